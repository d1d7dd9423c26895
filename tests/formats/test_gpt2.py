"""GPT-2 in folders as they were released, whose matrices are [in, out] and whose names lack their
beginning, and its adapters in PEFT."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.config.run import Data, Run, Train
from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf, model_from_config
from lmwright.formats.peft import merge_into, read_adapter, to_peft
from lmwright.formats.peft_folder import read_folder, write_folder
from lmwright.formats.proof import logits
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora import resolved
from lmwright.program.lora_section import LowRank
from tests.formats.test_gpt_neox import IDS, close, says
from tests.in_memory import export_hf
from tests.parity.compare import randomize

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
OF = {"architectures": ["GPT2LMHeadModel"]}
NAMES = ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def base():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).eval()
    randomize(model)
    return model


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder with the names and the buffers of the first files."""
    folder = tmp_path_factory.mktemp("gpt2")
    base().save_pretrained(folder)
    files = load_file(folder / "model.safetensors")
    files = {name.removeprefix("transformer."): array for name, array in files.items()}
    assert files["h.0.attn.c_attn.weight"].shape == (32, 96)
    for layer in range(2):
        files[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 24, 24), np.float32))
        files[f"h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_released_folder_and_its_export(released, tmp_path):
    model, w, _ = import_hf(released)
    close(logits(model, w, IDS), says(base()))
    proof = export_hf(model, w, None, tmp_path / "new")
    assert proof.folder_to_transformers is not None, proof.transformers
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert np.array_equal(says(again.float().eval()), says(base()))
    with pytest.raises(UserError, match="'int8' is not written for GPT-2, whose matrices are not"):
        export_hf(model, w, None, tmp_path / "rounded", dtype="int8")


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_have_the_names_of_peft(dora, released, tmp_path):
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=list(NAMES), task_type="CAUSAL_LM", use_dora=dora,
        fan_in_fan_out=True,
    )  # fmt: skip
    theirs = peft.get_peft_model(base(), config)
    for name, p in theirs.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            p.data = p.data + torch.randn_like(p) * 0.2
    theirs.save_pretrained(tmp_path / "theirs")
    expected = says(theirs)
    model, w, _ = import_hf(released)
    run = Run(
        name="x", dir="x", model=model, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3),
        lora=LowRank(
            targets=NAMES, base="fp32", rank=3, alpha=7.0, variant="dora" if dora else "lora"
        ),
        train=Train(steps=1, global_batch_size=2, precision="fp32"),
    )  # fmt: skip
    (adapter,) = resolved(run)
    weights = read_adapter(tmp_path / "theirs", model, adapter)
    _, merged = merge_into(model, w, read_folder(tmp_path / "theirs"), "theirs")
    close(logits(model, merged, IDS), expected)
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", to_peft(model, adapter, weights, "some/base"))
    assert json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["fan_in_fan_out"]
    close(says(peft.PeftModel.from_pretrained(base(), tmp_path / "ours")), expected)


def test_config_json_by_its_rules():
    model = model_from_config(SIZES | OF | {"n_ctx": 24}, "config.json")
    assert (model.mlp_dim, model.mlp, model.head) == (128, "gelu_tanh", "tied")
    assert model_from_config(OF | {"n_inner": 40}, "here").mlp_dim == 40
    for other in ({"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True},
                  {"add_cross_attention": True}):  # fmt: skip
        (name,) = other
        with pytest.raises(UserError, match=f"{name} = .* is not computed"):
            model_from_config(SIZES | OF | other, "config.json")
    with pytest.raises(UserError, match="n_embd = 'wide' is not a whole number"):
        model_from_config(SIZES | OF | {"n_embd": "wide"}, "config.json")
