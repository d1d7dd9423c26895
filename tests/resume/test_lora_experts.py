"""Adapters on the matrices of experts: trained, kept, merged, and what PEFT makes of them."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.core.param import Param, walk
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.load import load_model
from lmwright.formats.peft import read_adapter, to_peft
from lmwright.formats.peft_folder import read_folder, write_folder
from lmwright.formats.proof import logits
from lmwright.formats.weights import trained
from lmwright.program.lora import bind, resolved, scaled
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from lmwright.train.session import train
from tests.resume.small_runs import in_dir

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 32,
    "initializer_range": 0.2, "num_experts_per_tok": 3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 7, "intermediate_size": 28},
    "qwen3_moe": {
        "num_experts": 7, "moe_intermediate_size": 28, "intermediate_size": 80,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    },
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 23)).astype(np.int32)


def make_base(family, folder, **changes):
    """A random model of transformers in a folder, and ours for its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family] | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return model_from_config(json.loads((folder / "config.json").read_text()), "base")


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, small_run, tmp_path_factory):
    """A run that has trained adapters on the experts and on q for 12 steps, half of them after
    it was stopped, on two devices."""
    root = tmp_path_factory.mktemp(request.param)
    model = make_base(request.param, root / "base")
    run = replace(
        in_dir(small_run, root / "run"),
        model=model,
        optim=replace(small_run.optim, learning_rate=3e-2),
        eval=replace(small_run.eval, first="start"),
        data=replace(small_run.data, sources=()),  # prepared; the base has no tokenizer
        train=replace(small_run.train, init_from=str(root / "base")),
        lora=LowRank(targets=("experts", "q_proj"), rank=5, alpha=9.0, base="fp32",
                     ranks={"expert_up": 3}, alphas={"expert_down": 4.0}),
    )  # fmt: skip
    half = replace(run, train=replace(run.train, steps=6))
    assert train(half, jax.devices()[:1]).step == 6
    assert train(run, jax.devices()[:2]).step == 12
    return run


def torch_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def torch_logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor(TOKENS).long()).logits.numpy()


def test_it_trains_is_kept_and_merged(run, tmp_path):
    rows = map(json.loads, (Path(run.dir) / "metrics.jsonl").read_text().splitlines())
    held_out = [row["loss"] for row in rows if row["kind"] == "eval"]
    assert held_out[-1] < held_out[0] - 0.1
    base, adapter = Path(run.train.init_from), tmp_path / "adapter"
    export_adapter_command(run.dir, adapter)
    merge_command(base, adapter, tmp_path / "merged", dtype="fp32")
    export_command(run.dir, tmp_path / "exported", dtype="fp32")
    (one,), plan = resolved(run), resolve(run, jax.devices()[:1])
    frozen, weights = trained(plan, Path(run.dir))
    params = {module.path: module.param for module in one.modules}
    beside = bind(params, frozen.weights, scaled(one, weights["default"]))
    expected = logits(run.model, beside, TOKENS)  # base and sum of low rank, each by itself
    plain = logits(run.model, frozen.weights, TOKENS)
    assert np.abs(expected - plain).max() > 0.1
    for folder in (run.dir, tmp_path / "merged", tmp_path / "exported"):
        loaded = load_model(folder)
        np.testing.assert_allclose(logits(loaded.model, loaded.weights, TOKENS), expected,
                                   atol=2e-4)  # fmt: skip
    np.testing.assert_allclose(torch_logits(torch_model(tmp_path / "merged")), expected, atol=2e-4)

    assert any(".experts." in name for name in read_folder(adapter).modules)
    back = dict(walk(read_adapter(adapter, run.model, one)))
    for path, leaf in walk(weights["default"]):
        np.testing.assert_allclose(back[path], leaf, rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("scaling", ["rank", "sqrt-rank"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_factors_of_experts(family, scaling, small_run, tmp_path):
    """With one rank and alpha for all experts, and in models without plain layers."""
    plain = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    model = make_base(family, tmp_path / "base", **plain)
    lora = LowRank(
        targets=("experts", "q_proj"), rank=5, alpha=9.0, ranks={"q": 3}, base="fp32",
        scaling=scaling,
    )  # fmt: skip
    (one,) = resolved(replace(small_run, model=model, lora=lora))
    rng = np.random.default_rng(1)
    draw = lambda param: (rng.normal(size=param.shape) * 0.1).astype(np.float32)  # noqa: E731
    weights = jax.tree.map(draw, one.spec, is_leaf=lambda leaf: isinstance(leaf, Param))
    (tmp_path / "adapter").mkdir()
    write_folder(tmp_path / "adapter", to_peft(model, one, weights, "base"))
    loaded = load_model(tmp_path / "base")
    plain = logits(model, loaded.weights, TOKENS)
    params = {module.path: module.param for module in one.modules}
    expected = logits(model, bind(params, loaded.weights, scaled(one, weights)), TOKENS)
    assert np.abs(expected - plain).max() > 0.1
    theirs = peft.PeftModel.from_pretrained(torch_model(tmp_path / "base"), tmp_path / "adapter")
    np.testing.assert_allclose(torch_logits(theirs), expected, atol=2e-4)
