"""GPT-NeoX in folders of every age, and its adapters in PEFT, whose names are those of transformers
5 and not those of the files."""

from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.config.run import Data, Run, Train
from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf, model_from_config
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.peft import merge_into, read_adapter, to_peft
from lmwright.formats.peft_folder import read_folder, write_folder
from lmwright.formats.proof import logits
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora import resolved
from lmwright.program.lora_section import LowRank
from tests.in_memory import export_hf
from tests.parity.compare import in_files, randomize

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
OF = {"architectures": ["GPTNeoXForCausalLM"]}
LAYER = "gpt_neox.layers.{}.attention."
NAMES = ("query_key_value", "dense", "dense_4h_to_h", "lm_head")
IDS = np.random.default_rng(0).integers(0, 61, (2, 11))


def base(**said):
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5, **said)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    randomize(model)
    return model


def says(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor(IDS)).logits.numpy()


def close(ours, theirs):
    assert np.abs(np.asarray(ours) - theirs).max() <= 1e-5 * np.abs(theirs).max()


def read(name):
    return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_an_old_folder_and_its_export(tied, tmp_path):
    """With the buffers of transformers 4, and a copy of the table where the head is tied."""
    theirs = base(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "old")
    files = load_file(tmp_path / "old" / "model.safetensors")
    assert ("embed_out.weight" in files) != tied
    files.setdefault("embed_out.weight", files["gpt_neox.embed_in.weight"].copy())
    for layer in map(LAYER.format, range(2)):
        files[f"{layer}bias"] = np.tril(np.ones((1, 1, 32, 32), bool))
        files[f"{layer}masked_bias"] = np.array(-1e9, np.float32)
        files[f"{layer}rotary_emb.inv_freq"] = np.ones(3, np.float32)
    save_file(files, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    model, w, _ = import_hf(tmp_path / "old")
    close(logits(model, w, IDS), says(theirs))
    proof = export_hf(model, w, None, tmp_path / "new")
    assert proof.folder_to_transformers is not None, proof.transformers
    assert np.array_equal(says(read(tmp_path / "new")), says(theirs))


def test_adapters_have_the_names_of_peft(tmp_path):
    """Of the fused matrix, and of the head, which files call otherwise; one way and back."""
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=list(NAMES), task_type="CAUSAL_LM",
        modules_to_save=["embed_in"],
    )  # fmt: skip
    theirs = peft.get_peft_model(base(), config)
    for name, p in theirs.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            p.data = p.data + torch.randn_like(p) * 0.2
    theirs.save_pretrained(tmp_path / "theirs")
    expected = says(theirs)
    state = {k: v.numpy() for k, v in base().state_dict().items()}
    model = model_from_config(base().config.to_dict() | OF, "here")
    w = from_hf(model, in_files(model, state))
    run = Run(
        name="x", dir="x", model=model, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3),
        lora=LowRank(targets=NAMES, base="fp32", rank=3, alpha=7.0, whole=("embed_in",)),
        train=Train(steps=1, global_batch_size=2, precision="fp32"),
    )  # fmt: skip
    (adapter,) = resolved(run)
    weights = read_adapter(tmp_path / "theirs", model, adapter, lambda: w)
    _, merged = merge_into(model, w, read_folder(tmp_path / "theirs"), "theirs")
    close(logits(model, merged, IDS), expected)
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", to_peft(model, adapter, weights, "some/base"))
    close(says(peft.PeftModel.from_pretrained(base(), tmp_path / "ours")), expected)


def test_config_json_by_its_rules():
    fields = partial(model_from_config, where="config.json")
    model = fields(SIZES | OF)
    assert (model.rotary_fraction, model.rope_theta, model.head) == (0.25, 10_000.0, "untied")
    assert model.residual == "parallel" and model.bias == "all" and model.mlp == "gelu_erf"
    # transformers reads neither beside its own names
    assert fields(SIZES | OF | {"rope_theta": 77.0, "partial_rotary_factor": 0.5}) == model
    other = fields(SIZES | OF | {"rotary_emb_base": 77, "rotary_pct": 0.5})
    assert (other.rotary_fraction, other.rope_theta) == (0.5, 77.0)
    for act in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        assert fields(SIZES | OF | {"hidden_act": act}).mlp == "gelu_tanh"
    with pytest.raises(UserError, match="hidden_act 'silu' is not supported; these are: gelu, "):
        fields(SIZES | OF | {"hidden_act": "silu"})
    with pytest.raises(UserError, match="hidden_size = 33 is not a multiple"):
        fields(SIZES | OF | {"hidden_size": 33})
