"""Each family over devices gives the single device's loss and gradients; windows, soft caps,
norms over heads and fused projections included."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from lmwright.errors import UserError
from lmwright.models.apertus import Apertus
from lmwright.models.bamba import Bamba
from lmwright.models.bert import Bert
from lmwright.models.cohere import Cohere
from lmwright.models.cwm import Cwm
from lmwright.models.deberta import Deberta
from lmwright.models.ernie4_5 import Ernie45
from lmwright.models.exaone4 import Exaone4
from lmwright.models.falcon_h1 import FalconH1
from lmwright.models.fanformer import Fanformer
from lmwright.models.gemma import Gemma
from lmwright.models.gemma1 import Gemma1
from lmwright.models.gemma4 import Gemma4
from lmwright.models.glm4 import Glm4
from lmwright.models.gpt2 import Gpt2
from lmwright.models.gpt_bigcode import GptBigcode
from lmwright.models.gpt_neox import GptNeox
from lmwright.models.granite import Granite
from lmwright.models.granite4 import Granite4
from lmwright.models.granite_swa import GraniteSwa
from lmwright.models.helium import Helium
from lmwright.models.hunyuan import Hunyuan
from lmwright.models.lfm2 import Lfm2
from lmwright.models.lfm3 import Lfm3
from lmwright.models.llama import Llama
from lmwright.models.mamba2 import Mamba2
from lmwright.models.ministral3 import Ministral3
from lmwright.models.modernbert import ModernBert, ModernBertDecoder
from lmwright.models.nanochat import NanoChat
from lmwright.models.nemotron import Jais2, Nemotron
from lmwright.models.nemotron_h import NemotronH
from lmwright.models.olmo import Olmo
from lmwright.models.olmo2 import Olmo2
from lmwright.models.olmo_hybrid import OlmoHybrid
from lmwright.models.opt import Opt
from lmwright.models.phi import Phi
from lmwright.models.phi3 import Phi3
from lmwright.models.qwen3_5 import Qwen35
from lmwright.models.seed_oss import SeedOss
from lmwright.models.smollm3 import SmolLm3
from lmwright.models.stablelm import StableLm
from lmwright.models.starcoder2 import Starcoder2
from lmwright.models.xlstm import Xlstm
from lmwright.models.xlstm_blocks import XlstmBlocks
from lmwright.nn.rope import LinearRope, LongRope, ProportionalRope, YarnRope
from tests.sharded import problem
from tests.sharded.problem import SEQ_LEN, VOCAB, assert_same, gradients, make_run

SIZES = {
    "vocab_size": VOCAB, "embed_dim": 24, "mlp_dim": 40, "num_layers": 4, "num_heads": 16,
    "num_kv_heads": 8, "head_dim": 6, "seq_len": SEQ_LEN,
}  # fmt: skip
YARN = YarnRope(factor=4.0, original_seq_len=12)
SHORT, LONG = (1.0, 1.2), (2.0, 3.0)
MODELS = {
    "llama": Llama(
        **SIZES, window=7, layer_pattern=("local", "global"), bias="all", qk_norm="head",
        rope_scaling=YARN,
    ),
    "gemma1": Gemma1(**SIZES),
    "gemma2": Gemma(**SIZES, window=7, attention_soft_cap=1.5, logits_soft_cap=2.0, query_dim=5),
    "vaultgemma": Gemma(**SIZES, window=7, out_norms="none", attention_soft_cap=1.5),
    "gemma3": Gemma(
        **SIZES, window=7, qk_norm="head", local_rope_theta=77.0, head="untied",
        rope_scaling=LinearRope(factor=3.0),
    ),
    "gemma4": Gemma4(
        **SIZES, window=7, layer_pattern=("local", "global"), global_head_dim=10,
        num_shared_layers=2, shared_mlp_dim=56, layer_input_dim=14, logits_soft_cap=2.0,
        norm_eps=0.1,
    ),
    "gemma4-keys": Gemma4(
        **SIZES, window=7, layer_pattern=("local", "global"), global_head_dim=10,
        global_kv_heads=4, global_values="keys", rope_scaling=ProportionalRope(fraction=0.6),
    ),
    "olmo2": Olmo2(**SIZES, bias="attention"),
    "olmo3": Olmo2(
        **SIZES, window=7, layer_pattern=("local", "global"), local_rope_theta=77.0,
        rope_scaling=YARN,
    ),
    "smollm3": SmolLm3(**SIZES, rope_pattern=("rope", "nope"), bias="mlp"),
    "ministral3": Ministral3(
        **SIZES, query_growth=0.7, rope_scaling=YarnRope(factor=3.0, original_seq_len=9),
    ),
    "lfm2": Lfm2(**SIZES, mixer_pattern=("conv", "full"), conv_tokens=4),
    "lfm3": Lfm3(**SIZES, mixer_pattern=("conv", "local"), window=7, norm_eps=1e-3),
    "granite": Granite(
        **SIZES, embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.4,
        logits_scaling=2.0, bias="all",
    ),
    "granite-swa": GraniteSwa(
        **SIZES, window=7, layer_pattern=("global", "local"), rotating_layers="local",
        local_rope_theta=77.0, embedding_multiplier=12.0, attention_multiplier=0.3,
        residual_multiplier=0.4, logits_scaling=2.0, bias="all",
    ),
    "granite4": Granite4(
        **SIZES, mixer_pattern=("mamba", "full"), mamba_num_heads=16, mamba_head_dim=10,
        mamba_state_dim=6, mamba_num_groups=4, conv_tokens=3, chunk_tokens=8,
        embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.4,
    ),
    "nemotron-h": NemotronH(
        **SIZES, mixer_pattern=("mamba", "mlp"), mamba_num_heads=16, mamba_head_dim=10,
        mamba_state_dim=6, mamba_num_groups=4, conv_tokens=3, chunk_tokens=8,
    ),
    "bamba": Bamba(
        **SIZES, mixer_pattern=("mamba", "full"), mamba_num_heads=16, mamba_head_dim=10,
        mamba_state_dim=6, mamba_num_groups=4, conv_tokens=3, chunk_tokens=8, bias="all",
        rotary_fraction=0.67, rope_scaling=YARN, norm_eps=0.05,
    ),
    "mamba2": Mamba2(
        vocab_size=VOCAB, embed_dim=24, num_layers=4, seq_len=SEQ_LEN, mamba_num_heads=16,
        mamba_head_dim=10, mamba_state_dim=6, mamba_num_groups=4, conv_tokens=3, chunk_tokens=8,
        norm_eps=0.05,
    ),
    "falcon-h1": FalconH1(
        **SIZES, mamba_num_heads=16, mamba_head_dim=10, mamba_state_dim=6, mamba_num_groups=4,
        conv_tokens=3, chunk_tokens=8, bias="all", ssm_multipliers=(1.2, 0.8, 1.1, 0.7, 0.4),
        attention_out_multiplier=0.7, mlp_multipliers=(0.9, 0.6), embedding_multiplier=12.0,
    ),
    "modernbert": ModernBert(
        **SIZES, window=7, layer_pattern=("global", "local"), local_rope_theta=77.0,
        rope_scaling=LinearRope(factor=3.0),
        biases=("attention", "mlp", "norm", "dense", "decoder"),
    ),
    "deberta": Deberta(
        **SIZES | {"num_kv_heads": 16}, position_buckets=6, max_distance=20,
    ),
    "bert": Bert(**SIZES | {"num_kv_heads": 16}, separator_id=5),
    "fanformer": Fanformer(**SIZES),
    "qwen3-5": Qwen35(
        **SIZES, mixer_pattern=("linear", "full"), linear_num_key_heads=8, linear_head_dim=10,
        linear_num_value_heads=16, chunk_tokens=8, rotary_fraction=0.67, norm_eps=0.05,
    ),
    "olmo-hybrid": OlmoHybrid(
        **SIZES, mixer_pattern=("linear", "full"), linear_num_key_heads=8, linear_key_dim=10,
        linear_num_value_heads=16, linear_value_dim=14, chunk_tokens=8, norm_eps=0.05,
        rotation="rope", bias="attention",
    ),
    "xlstm": Xlstm(
        **{k: v for k, v in SIZES.items() if k != "num_kv_heads"}, key_dim=4, chunk_tokens=8,
    ),
    "xlstm-blocks": XlstmBlocks(
        **{k: v for k, v in SIZES.items() if k not in ("num_kv_heads", "head_dim", "embed_dim")},
        embed_dim=64, chunk_tokens=8, block_pattern=("mlstm", "slstm"),
    ),
    "gpt-neox": GptNeox(**SIZES | {"num_kv_heads": 16}, rotary_fraction=0.67, norm_eps=1e-3),
    "gpt-neox-sequential": GptNeox(
        **SIZES | {"num_kv_heads": 16}, residual="sequential", mlp="gelu_tanh", bias="mlp",
        rotary_fraction=0.34, rope_scaling=YARN, head="tied",
    ),
    "gpt-bigcode": GptBigcode(**SIZES | {"num_kv_heads": 1}, norm_eps=1e-3),
    "opt": Opt(**SIZES | {"num_kv_heads": 16}),
    "gpt2": Gpt2(**SIZES | {"num_kv_heads": 16}, norm_eps=1e-3),
    "modernbert-decoder": ModernBertDecoder(
        **SIZES | {"num_kv_heads": 16}, window=7, layer_pattern=("global", "local"),
        biases=("attention", "mlp", "norm", "dense", "decoder"), rope_scaling=YARN,
    ),
    "nanochat": NanoChat(**SIZES, bias="attention", logits_soft_cap=2.0),
    "glm4": Glm4(**SIZES, rotary_fraction=0.75, bias="qkv"),
    "ernie4-5": Ernie45(**SIZES, bias="all", rope_scaling=YARN),
    "cohere": Cohere(**SIZES, qk_norm="head", bias="attention", rope_scaling=YARN),
    "cohere2": Cohere(**SIZES, window=7, layer_pattern=("local", "global"), head="untied"),
    "starcoder2": Starcoder2(**SIZES, window=7, rope_scaling=YARN),
    "nemotron": Nemotron(**SIZES, bias="all", rotary_fraction=0.67, rope_scaling=YARN),
    "jais2": Jais2(**SIZES, rope_scaling=YARN),
    "stablelm": StableLm(**SIZES, qk_norm="head", bias="qkv", rotary_fraction=0.67),
    "stablelm-parallel": StableLm(
        **SIZES, residual="parallel", qk_norm="head", rotary_fraction=0.34, head="tied",
    ),
    "phi": Phi(**SIZES, qk_norm="head", rotary_fraction=0.67, rope_scaling=YARN),
    "olmo": Olmo(**SIZES, bias="attention", qkv_limit=0.7, head="tied"),
    "exaone4": Exaone4(**SIZES, window=7, layer_pattern=("local", "global")),
    "hunyuan": Hunyuan(**SIZES, bias="attention"),
    "seed-oss": SeedOss(**SIZES),
    "cwm": Cwm(
        **SIZES, window=7, layer_pattern=("global", "local"), bias="mlp", rope_scaling=YARN,
    ),
    "helium": Helium(**SIZES | {"embed_dim": 96}, bias="qkv", rope_scaling=YARN),
    "apertus": Apertus(**SIZES, bias="attention"),
    "phi3": Phi3(
        **SIZES, window=7, rotary_fraction=0.75,
        rope_scaling=LongRope(
            factor=2.0, original_seq_len=20, short_factor=SHORT, long_factor=LONG
        ),
    ),
}  # fmt: skip
RECURRENT = ("xlstm", "xlstm-blocks")  # whose rows are not cut
ROWS_WHOLE = {"data": 2, "fsdp": 2, "tensor": 2}
MESH = {"fsdp": 2, "context": 2, "tensor": 2}
STAGES = {"stage": 2, "fsdp": 2, "tensor": 2}
PIPELINE = {"stage": 2, "context": 2, "tensor": 2}


@pytest.fixture(autouse=True)
def norms_and_biases_do_something(monkeypatch):
    fresh, rng = problem.fresh_weights, np.random.default_rng(3)
    stir = lambda a: a + 0.1 * rng.standard_normal(a.shape).astype(a.dtype)  # noqa: E731
    stirred = cache(lambda model: jax.tree.map(stir, fresh(model)))
    monkeypatch.setattr(problem, "fresh_weights", stirred)
    return stirred


def run_of(name, num_layers, axes=None, **train):
    return replace(make_run(axes, **train), model=replace(MODELS[name], num_layers=num_layers))


@cache
def alone(name, num_layers):
    return gradients(run_of(name, num_layers))


def check(name, axes, num_layers=None, **train):
    # norms of heads of four cells make rounding larger, or of memories with an epsilon of 1e-5
    share = 3e-5 if name in ("xlstm-blocks", "olmo-hybrid") else 1e-5
    shares = name == "gemma4"  # keys and values, one pair of layers those of another
    num_layers = num_layers or (4 if "stage" in axes or shares else 2)  # a pair for each stage
    assert_same(gradients(run_of(name, num_layers, axes, **train)), alone(name, num_layers), share)


def slow_but(*quick, without=()):
    """All families whose keys `mesh.tensor` can cut; those that are not named are for the long
    suite."""
    slow, without = pytest.mark.slow, (*without, "gpt-bigcode")
    names = [name for name in MODELS if name not in without]
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


@pytest.mark.parametrize(
    "name",
    [
        "deberta",
        "xlstm",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3-5", "olmo-hybrid", "xlstm-blocks")
        ),
    ],
)
def test_rows_and_heads_cut(name):
    check(name, ROWS_WHOLE, num_microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("qwen3-5", "olmo-hybrid", *RECURRENT))
def test_stages_of_layers_with_memories(name):
    check(name, STAGES, num_microbatches=4, remat="dots")


@pytest.mark.parametrize(
    "name", slow_but("gemma4-keys", "qwen3-5", without=("deberta", *RECURRENT))
)
def test_rows_tokens_and_heads_cut(name):
    check(name, MESH, num_microbatches=2)


@pytest.mark.parametrize(
    "name, mixer",
    [
        ("lfm2", "conv"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("qwen3-5", "linear"), ("granite4", "mamba"))
        ),
    ],
)
def test_rows_without_any_attention_cut(name, mixer):
    model = replace(MODELS[name], mixer_pattern=(mixer,), num_layers=2)
    assert model.work(SEQ_LEN).attention is None
    found, want = (
        gradients(replace(make_run(axes, num_microbatches=2), model=model)) for axes in (MESH, None)
    )
    assert_same(found, want)


# the first layer of ModernBERT is like no other, and Gemma 4's last ones look at others
WHOLE = ("modernbert", "modernbert-decoder", "deberta", "gemma4", *RECURRENT)


def test_one_key_is_not_cut():
    with pytest.raises(UserError, match=r"mesh\.tensor: 2 does not divide the 1 of model"):
        gradients(run_of("gpt-bigcode", 2, {"fsdp": 4, "tensor": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 4, "context": 2}, {"stage": 2, "fsdp": 2, "context": 2}])
def test_one_key_for_all_heads(axes):
    check("gpt-bigcode", axes, num_microbatches=2)


@pytest.mark.parametrize("name", slow_but("gemma2", without=WHOLE))
def test_stages(name):
    check(name, PIPELINE, num_microbatches=4, remat="block")


def test_stages_behind_a_layer_apart():
    model = replace(MODELS["modernbert"], layer_pattern=("global",), num_layers=3)
    found, want = (
        gradients(replace(make_run(axes, num_microbatches=2), model=model))
        for axes in ({"stage": 2}, None)
    )
    assert_same(found, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modernbert", "modernbert-decoder", "gemma2"])
def test_stages_behind_or_before_a_layer_apart(name):
    check(name, PIPELINE, num_layers=5, num_microbatches=4, remat="block")


@pytest.mark.parametrize("name", slow_but(without=("deberta", *RECURRENT)))
def test_heads_traded_for_tokens(name):
    check(name, {"data": 2, "context": 4}, context_attention="all_to_all", remat="dots")
