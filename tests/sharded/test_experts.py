"""Experts over devices give the single device's loss, metrics and gradients."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core import ragged
from lmwright.core.sharding import AXES, make_mesh
from lmwright.errors import UserError
from lmwright.models.afmoe import Afmoe
from lmwright.models.deepseek import DeepSeekV3
from lmwright.models.ernie4_5 import Ernie45Moe
from lmwright.models.exaone_moe import ExaoneMoe
from lmwright.models.experts import Experts
from lmwright.models.gemma4 import Gemma4Moe
from lmwright.models.gpt_oss import GptOss
from lmwright.models.granite_moe import GraniteMoe, GraniteMoeSwa
from lmwright.models.hunyuan_moe import HunyuanMoe
from lmwright.models.llama4 import Llama4
from lmwright.models.mellum import Mellum
from lmwright.models.minimax_m2 import MinimaxM2
from lmwright.models.mistral4 import Mistral4
from lmwright.models.moe import Mixtral
from lmwright.models.nemotron_h import NemotronHMoe
from lmwright.models.phimoe import Phimoe
from lmwright.models.qwen3_next import Qwen3Next
from lmwright.models.reasoning import Reasoning
from lmwright.models.solar_open import SolarOpen
from lmwright.nn import exchange
from lmwright.nn.moe import Dispatch, mixture
from lmwright.nn.rope import YarnRope
from tests.sharded import problem
from tests.sharded.problem import SEQ_LEN, VOCAB, assert_same, gradients, make_run

SIZES = {
    "vocab_size": VOCAB, "embed_dim": 24, "num_layers": 2, "num_heads": 16, "num_kv_heads": 8,
    "head_dim": 6, "seq_len": SEQ_LEN,
}  # fmt: skip
ONE_LAYER = SIZES | {"num_layers": 1}
BIASED = DeepSeekV3(
    **ONE_LAYER | {"num_kv_heads": 16, "head_dim": 10}, mlp_dim=40, qk_rope_head_dim=4,
    v_head_dim=8, kv_lora_rank=16, q_lora_rank=24, norm_eps=0.01,
    experts=Experts(
        num_experts=16, experts_per_token=3, mlp_dim=16, shared_dim=32, score="sigmoid",
        num_groups=4, groups_per_token=2, scale=1.5, bias_rate=0.01, balance_loss=0.1, z_loss=0.01,
    ),
    reasoning=Reasoning(every=1, num_experts=8, mlp_dim=8, experts_per_token=2, z_loss=0.1),
)  # fmt: skip
SOFTMAX = Mixtral(
    **SIZES,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, balance_loss=0.1),
    reasoning=Reasoning(every=1, num_experts=8, mlp_dim=8),
)
OSS = GptOss(
    **ONE_LAYER,
    window=7,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, balance_loss=0.1, bias="all"),
)
GEMMA4 = Gemma4Moe(
    **SIZES, mlp_dim=40, window=7, layer_pattern=("local", "global"), global_head_dim=10,
    global_kv_heads=4, global_values="keys", norm_eps=0.01,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, balance_loss=0.1),
)  # fmt: skip
NEXT = Qwen3Next(
    **SIZES, mixer_pattern=("linear", "full"), linear_num_key_heads=8, linear_head_dim=10,
    linear_num_value_heads=16, chunk_tokens=8, rotary_fraction=0.67, norm_eps=0.05,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, balance_loss=0.1,
                    shared_dim=24, shared_gate="sigmoid"),
)  # fmt: skip
NEMOTRON = NemotronHMoe(
    **SIZES, mixer_pattern=("mamba", "moe"), mlp_dim=16, mamba_num_heads=16, mamba_head_dim=10,
    mamba_state_dim=6, mamba_num_groups=4, conv_tokens=3, chunk_tokens=8,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, shared_dim=24,
                    latent_dim=12, score="sigmoid", bias_rate=0.01),
)  # fmt: skip
MINIMAX = MinimaxM2(
    **SIZES, rotary_fraction=0.67,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, score="sigmoid",
                    bias_rate=0.01),
)  # fmt: skip
MELLUM = Mellum(
    **SIZES, mlp_dim=40, window=7, layer_pattern=("local", "global"), local_rope_theta=77.0,
    rope_scaling=YarnRope(factor=4.0, original_seq_len=12),
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, balance_loss=0.1),
)  # fmt: skip
ERNIE = Ernie45Moe(
    **SIZES, mlp_dim=40,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, shared_dim=24, bias_rate=0.01),
)  # fmt: skip
MISTRAL4 = Mistral4(
    **ONE_LAYER | {"num_kv_heads": 16, "head_dim": 10}, mlp_dim=40, qk_rope_head_dim=4,
    v_head_dim=8, kv_lora_rank=16, q_lora_rank=24, norm_eps=0.01, query_growth=0.7,
    rope_scaling=YarnRope(factor=3.0, original_seq_len=9, mscale=1.0, mscale_all_dim=1.0),
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, shared_dim=16),
)  # fmt: skip
BY_REACH = dict(
    mlp_dim=40, window=7, layer_pattern=("local", "global"),
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, shared_dim=24,
                    score="sigmoid", bias_rate=0.01),
)  # fmt: skip
EXAONE = ExaoneMoe(**SIZES, **BY_REACH)
AFMOE = Afmoe(**SIZES, **BY_REACH, embedding_scale="root", bias="attention")
SOLAR = SolarOpen(**SIZES, bias="qkv", experts=BY_REACH["experts"])
SCALED = dict(
    embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.4, mlp_dim=24,
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, balance_loss=0.1),
)  # fmt: skip
GRANITE = GraniteMoe(**SIZES, **SCALED, bias="attention")
GRANITE_SWA = GraniteMoeSwa(
    **SIZES, **SCALED, window=7, layer_pattern=("global", "local"), rotating_layers="local",
)  # fmt: skip
LLAMA4 = Llama4(
    **SIZES, mlp_dim=40, layer_pattern=("local", "global"), chunk_tokens=7, growth_tokens=5,
    experts=Experts(num_experts=8, experts_per_token=2, mlp_dim=16, shared_dim=16,
                    score="sigmoid", shares="all", weighed="inputs"),
)  # fmt: skip
PHIMOE = Phimoe(
    **SIZES, window=7, bias="attention", head_bias="all", head="tied",
    experts=Experts(num_experts=8, experts_per_token=2, mlp_dim=16, shares="near", margin=0.3,
                    balance_loss=0.1),
)  # fmt: skip
HUNYUAN = HunyuanMoe(
    **SIZES, bias="attention",
    experts=Experts(num_experts=8, experts_per_token=3, mlp_dim=16, shared_dim=16),
)  # fmt: skip
PRODUCT, GRADIENT = ragged._product, ragged._gradient_by_blocks
PLACES = replace(SOFTMAX, experts=replace(SOFTMAX.experts, capacity_factor=0.8))


def run_of(model, axes=None, **train):
    return replace(make_run(axes, **train), model=model)


@cache
def alone(model):
    """Of the single device; what starts at zero is given values, or nothing would reach it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_product", PRODUCT)
        patch.setattr(ragged, "_gradient_by_blocks", GRADIENT)
        return gradients(run_of(model))


def stirred(a):
    """The same, or small numbers where all are zero."""
    a = np.asarray(a)
    return a if a.any() else (0.02 * np.cos(np.arange(a.size))).reshape(a.shape).astype("f4")


@pytest.fixture(autouse=True)
def nothing_is_zero(monkeypatch):
    fresh = problem.fresh_weights
    monkeypatch.setattr(problem, "fresh_weights", lambda m: jax.tree.map(stirred, fresh(m)))


MESHES = [
    (BIASED, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (PLACES, {"data": 2, "expert": 4}),
    (OSS, {"expert": 2, "context": 2, "tensor": 2}),
]
MORE_MESHES = [
    (BIASED, {"expert": 8}),
    (BIASED, {"data": 2, "fsdp": 2, "expert": 2}),
    (BIASED, {"expert": 2, "context": 2, "tensor": 2}),
    (BIASED, {"fsdp": 2, "context": 2, "tensor": 2}),
    (PLACES, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (SOFTMAX, {"tensor": 8}),
    (OSS, {"fsdp": 2, "expert": 4}),
    (GEMMA4, {"expert": 2, "context": 2, "tensor": 2}),
    (GEMMA4, {"fsdp": 2, "expert": 4}),
    (NEXT, {"expert": 2, "context": 2, "tensor": 2}),
    (NEXT, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (NEMOTRON, {"expert": 2, "context": 2, "tensor": 2}),
    (NEMOTRON, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (MINIMAX, {"expert": 2, "context": 2, "tensor": 2}),
    (ERNIE, {"expert": 2, "context": 2, "tensor": 2}),
    (MELLUM, {"expert": 2, "context": 2, "tensor": 2}),
    (MELLUM, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (EXAONE, {"expert": 2, "context": 2, "tensor": 2}),
    (AFMOE, {"expert": 2, "context": 2, "tensor": 2}),
    (AFMOE, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (LLAMA4, {"expert": 2, "context": 2, "tensor": 2}),
    (LLAMA4, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (SOLAR, {"expert": 2, "context": 2, "tensor": 2}),
    (GRANITE, {"expert": 2, "context": 2, "tensor": 2}),
    (GRANITE_SWA, {"expert": 2, "context": 2, "tensor": 2}),
    (GRANITE_SWA, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (PHIMOE, {"expert": 2, "context": 2, "tensor": 2}),
    (PHIMOE, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (HUNYUAN, {"expert": 2, "context": 2, "tensor": 2}),
    (MISTRAL4, {"expert": 2, "context": 2, "tensor": 2}),
    (replace(OSS, experts=replace(OSS.experts, capacity_factor=3.0)), {"fsdp": 4, "tensor": 2}),
]


@pytest.fixture
def spoiled(monkeypatch):
    """Products that leave NaN in rows of no expert, as TPU kernels may, which leave memory as it
    was; their gradient passes over such rows (tests/core/test_ragged.py)."""

    def or_else(rows, sizes, value):
        ours = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
        return jnp.where(ours[:, None], rows, value)

    def product(x, w, sizes, *args, **kwargs):
        return or_else(PRODUCT(x, w, sizes, *args, **kwargs), sizes, jnp.nan)

    def gradient(x, g, sizes):
        return GRADIENT(or_else(x, sizes, 0), or_else(g, sizes, 0), sizes)

    monkeypatch.setattr(ragged, "_product", product)
    monkeypatch.setattr(ragged, "_gradient_by_blocks", gradient)


@pytest.mark.usefixtures("spoiled")
@pytest.mark.parametrize(
    "model", [OSS, *(pytest.param(m, marks=pytest.mark.slow) for m in (BIASED, SOFTMAX))]
)
def test_rows_of_no_expert_leave_no_trace(model):
    assert_same(gradients(run_of(model)), alone(model))


@pytest.mark.usefixtures("spoiled")
@pytest.mark.parametrize(
    ("model", "axes"),
    [*MESHES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MESHES)],
)
def test_products(model, axes, monkeypatch):
    monkeypatch.setattr(exchange, "TILE", 8)  # several rounds
    found, want = gradients(run_of(model, axes)), alone(model)
    assert_same(found, want)
    dropped, choices = want[1].metrics["router_dropped"]
    assert (dropped > 0) == (model is PLACES) and choices > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [SOFTMAX, replace(MELLUM, num_layers=4), replace(BIASED, num_layers=3, dense_layers=(0,))],
)
def test_a_pipeline(model, monkeypatch):
    """Each piece on its way has a busiest expert of its own; all else is the same."""
    monkeypatch.setattr(exchange, "TILE", 8)
    axes = {"stage": 2, "expert": 2, "tensor": 2}
    grads, loss = gradients(run_of(model, axes, num_microbatches=2))
    want_grads, want = alone(model)
    for each in (loss, want):
        del each.metrics["router_busiest"]
        each.metrics.pop("reasoning_busiest", None)
    assert_same((grads, loss), (want_grads, want))


def test_experts_that_do_not_divide_are_refused():
    model = replace(SOFTMAX, experts=replace(SOFTMAX.experts, num_experts=6))
    with pytest.raises(UserError, match=r"mesh.expert: 4 does not divide the 6 of axis 'experts'"):
        gradients(run_of(model, {"expert": 4, "data": 2}))


@pytest.mark.parametrize("ways", [1, 2])
def test_no_layer_keeps_the_matrices_that_it_gathered(ways):
    axes = dict.fromkeys(AXES, 1) | {"fsdp": 8 // ways, "expert": ways}
    num, width, inner = 8, 64, 32
    shapes = {"up": (num, width, inner), "gate": (num, width, inner), "down": (num, inner, width)}
    w = {name: jnp.ones(shape) for name, shape in shapes.items()}
    ids = jnp.arange(64, dtype=jnp.int32).reshape(8, 4, 2) % num
    x, shares, real = jnp.ones((8, 4, width)), jnp.ones(ids.shape), jnp.ones((8, 4), bool)

    def output(x, shares, w):
        return mixture(x, ids, shares, real, w, Dispatch(num))[0]

    with jax.set_mesh(make_mesh(axes, jax.devices()[:8])):
        _, pull = jax.vjp(jax.jit(output), x, shares, w)
    kept = sum(a.size for a in jax.tree.leaves(pull))  # by all devices
    assert kept < 2 * sum(a.size for a in w.values())
