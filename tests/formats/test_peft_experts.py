"""Adapters on the experts of gpt-oss and Gemma 4: PEFT computes what they are here, from the same
folder, and what PEFT has made is read."""

import json

import numpy as np
import pytest

from lmwright.config.run import Data, Run, Train
from lmwright.core.param import map_params, nest
from lmwright.errors import UserError
from lmwright.formats.adapter_verbs import combine_command, merge_command
from lmwright.formats.hf_read import import_hf
from lmwright.formats.peft import to_peft
from lmwright.formats.peft_folder import read_folder, write_folder
from lmwright.formats.proof import logits
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora import bind, module_spec, resolved, scaled
from lmwright.program.lora_section import LowRank

torch = pytest.importorskip("torch", reason="torch is the reference")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CONFIG = {
    "vocab_size": 97, "hidden_size": 48,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 7, "num_local_experts": 3,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GEMMA4 = {name: size for name, size in CONFIG.items() if "experts" not in name} | {
    "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 28, "enable_moe_block": True,
    "global_head_dim": 14, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 29), dtype=np.int32)


def saved(cls, said, folder):
    """The folder of a random model of transformers."""
    torch.manual_seed(0)
    cls(cls.config_class(**said, initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved(transformers.GptOssForCausalLM, CONFIG, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Its files hold gate and up one behind the other."""
    return saved(transformers.Gemma4ForCausalLM, GEMMA4, tmp_path_factory.mktemp("gemma"))


def theirs(base, adapter=None):
    """Logits of PEFT, of the base alone without an adapter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ("all",), "rank": 3, "alpha": 5.0},
        {"targets": ("experts", "q_proj"), "rank": 2, "scaling": "sqrt-rank", "dropout": 0.1},
        {"targets": ("expert_up", "expert_gate"), "rank": 4, "ranks": {"expert_up": 2}},
        {"targets": ("expert_down",), "rank": 2, "alphas": {"expert_down": 9.0}},
    ],
    ids=lambda lora: " ".join(lora["targets"]),
)
def test_peft_computes_what_they_are_here(lora, base, tmp_path):
    assert_same_as_peft(lora, base, tmp_path)


def test_peft_computes_what_they_are_here_of_gemma4(gemma, tmp_path):
    assert_same_as_peft({"targets": ("all",), "rank": 3, "alpha": 5.0}, gemma, tmp_path)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]


def assert_same_as_peft(lora, base, tmp_path):
    """Our adapter with random factors is PEFT's, and merged into the base transformers'."""
    model, w, _ = import_hf(base)
    run = Run(
        name="x", dir="x", model=model, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3), train=Train(steps=1, global_batch_size=2),
        lora=LowRank(base="fp32", **lora),
    )  # fmt: skip
    (adapter,), dice = resolved(run), np.random.default_rng(1)
    draw = lambda p: (0.3 * dice.standard_normal(p.shape)).astype("f4")  # noqa: E731
    weights = nest((m.path, map_params(draw, module_spec(m, "lora"))) for m in adapter.modules)
    (tmp_path / "adapter").mkdir()
    write_folder(tmp_path / "adapter", to_peft(model, adapter, weights, str(base)))
    params = {module.path: module.param for module in adapter.modules}
    found = logits(model, bind(params, w, scaled(adapter, weights)), TOKENS)
    wanted = theirs(base, tmp_path / "adapter")
    assert np.abs(wanted - theirs(base)).max() > 0.05 * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())
    merge_command(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    again = theirs(tmp_path / "merged")
    np.testing.assert_allclose(again, wanted, atol=2e-4 * np.abs(wanted).max())


def made_by_peft(base, folder, **said):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    config = peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **said)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def test_an_adapter_of_some_layers_from_peft_is_merged(base, tmp_path):
    """As OpenAI's guide to fine-tuning names them: layer by layer."""
    parameters = ["0.mlp.experts.gate_up_proj", "1.mlp.experts.gate_up_proj",
                  "1.mlp.experts.down_proj"]  # fmt: skip
    assert_is_merged(base, tmp_path, parameters)
    with pytest.raises(UserError, match=r"target_parameters.*are not combined"):
        combine_command(tmp_path / "both", [tmp_path / "adapter", tmp_path / "adapter"])


def test_an_adapter_of_gemma4_from_peft_is_merged(gemma, tmp_path):
    parameters = ["0.experts.gate_up_proj", "1.experts.gate_up_proj", "1.experts.down_proj"]
    assert_is_merged(gemma, tmp_path, parameters)


def assert_is_merged(base, tmp_path, parameters):
    """What PEFT has made is merged into what PEFT computes."""
    made_by_peft(
        base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=parameters,
        rank_pattern={parameters[-1]: 2},
    )  # fmt: skip
    wanted = theirs(base, tmp_path / "adapter")
    assert np.abs(wanted - theirs(base)).max() > 0.05 * np.abs(wanted).max()
    merge_command(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    found = theirs(tmp_path / "merged")
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())


def test_other_parameters_are_refused(base, tmp_path):
    made_by_peft(base, tmp_path, target_parameters=["mlp.experts.gate_up_proj"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.gate_up_proj_bias"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"target_parameters = \[.*bias.*is not supported; these"):
        read_folder(tmp_path)
