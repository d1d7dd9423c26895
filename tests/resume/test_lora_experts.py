"""Adapters on the matrices of experts: trained, kept, merged, and what PEFT makes of them."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from podsmith.adapters.lora import bind, resolved, scaled
from podsmith.adapters.section import LowRank
from podsmith.checkpoint.adapter_verbs import export_adapter_command, merge_command
from podsmith.checkpoint.hf import export_command, load_model
from podsmith.checkpoint.peft import read_adapter
from podsmith.checkpoint.peft_folder import read_folder
from podsmith.checkpoint.proof import logits
from podsmith.checkpoint.reader import model_from_config
from podsmith.core.param import walk
from podsmith.plan.resolve import resolve
from podsmith.train.loop import train
from podsmith.train.lora_restore import trained

from .conftest import in_dir, losses

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


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, small_run, tmp_path_factory):
    """A run that has trained adapters on the experts and on q for 12 steps, half of them after
    it was stopped."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES, **FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "base")
    said = json.loads((root / "base/config.json").read_text())
    run = replace(
        in_dir(small_run, root / "run"),
        model=model_from_config(said, "base"),
        train=replace(small_run.train, init_from=str(root / "base")),
        lora=LowRank(targets=("experts", "q_proj"), rank=5, alpha=9.0, base="fp32",
                     ranks={"up": 3}, alphas={"down": 4.0}),
    )  # fmt: skip
    half = replace(run, train=replace(run.train, steps=6))
    assert train(half, jax.devices()[:1]).step == 6
    assert train(run, jax.devices()[:1]).step == 12
    return run


def test_it_trains_is_kept_and_merged(run, tmp_path):
    found = losses(run)
    assert found[12] < found[1] - 0.1
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
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        got = theirs(input_ids=torch.tensor(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(got, expected, atol=2e-4)

    assert any(".experts." in name for name in read_folder(adapter).modules)
    back = dict(walk(read_adapter(adapter, run.model, one)))
    for path, leaf in walk(weights["default"]):
        np.testing.assert_allclose(back[path], leaf, rtol=1e-6, atol=1e-7, err_msg=path)
