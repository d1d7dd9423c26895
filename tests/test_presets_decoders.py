"""Presets of released models: as many weights as published, and as transformers counts; each is
the model that its own config.json describes, and resolves on a TPU slice."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers

from lmwright import presets
from lmwright.config.run import Data, Mesh, Run, Train
from lmwright.core.param import count_params
from lmwright.formats.hf_read import model_from_config
from lmwright.planner.analytic.layout import Layout, on_paper
from lmwright.planner.analytic.machine import parse_machine
from lmwright.presets import (
    decoders,
    encoders,
    falcon_h1,
    granite4,
    layer_normed,
    mamba,
    nemotron,
    recurrent,
    research,
)

ALL = decoders.PRESETS | research.PRESETS | encoders.PRESETS | recurrent.PRESETS
ALL |= layer_normed.PRESETS
HYBRIDS = granite4.PRESETS | nemotron.PRESETS | falcon_h1.PRESETS | mamba.PRESETS
ALL |= {name: make for name, make in HYBRIDS.items() if "active" not in make.__doc__}
PRESETS = {name.replace(".", "-").replace("phi-3", "phi3"): make for name, make in ALL.items()}
# Of the published models: counts in their safetensors metadata. Those of DeBERTa are in
# test_counts_of_deberta: a count without the head was published.
PUBLISHED = {
    "llama-3-1-8b": 8_030_261_248,
    "llama-3-1-70b": 70_553_706_496,
    "llama-3-2-1b": 1_235_814_400,
    "llama-3-2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-5-0-5b": 494_032_768,
    "qwen2-5-1-5b": 1_543_714_304,
    "qwen2-5-3b": 3_085_938_688,
    "qwen2-5-7b": 7_615_616_512,
    "qwen2-5-14b": 14_770_033_664,
    "qwen2-5-32b": 32_763_876_352,
    "qwen2-5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "vaultgemma-1b": 1_038_741_120,
    "olmo2-1b": 1_484_916_736,
    "olmo3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    # as `transformers` counts Qwen3_5ForCausalLM of the released config.json
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1-2b": 1_170_340_608,
    "lfm2-2-6b": 2_569_272_320,
    "qwen3-5-0-8b": 752_393_024,
    "qwen3-5-2b": 1_881_825_088,
    "qwen3-5-4b": 4_205_751_296,
    "qwen3-5-9b": 8_953_803_264,
    "qwen3-5-27b": 26_895_998_464,
    "bert-base": 109_514_298,
    "granite-3-3-2b": 2_533_539_840,
    "granite-3-3-8b": 8_170_864_640,
    "xlstm-7b": 6_865_424_896,
    "phi3-mini": 3_821_079_552,
    # as `transformers` counts the default config of GlmForCausalLM and Ernie4_5ForCausalLM
    "glm-4-9b": 9_399_951_360,
    "ernie-4-5-0-3b": 360_748_032,
    "hunyuan-1-8b": 1_791_080_448,
    # as `transformers` counts the default config of CwmForCausalLM and HeliumForCausalLM
    "cwm-32b": 32_581_097_472,
    "helium-1-preview-2b": 2_172_643_840,
    # without embeddings 1.07 and 30.95 B, as its makers say
    "exaone-4-0-1-2b": 1_279_391_488,
    "exaone-4-0-32b": 32_003_216_384,
    "nemotron-nano-9b-v2": 8_888_227_328,
    # as `transformers` counts FalconH1ForCausalLM of the released config.json
    "falcon-h1-0-5b": 521_411_104,
    "falcon-h1-7b": 7_585_648_736,
    # as `transformers` counts BambaForCausalLM of the released config.json
    "bamba-9b": 9_780_235_392,
    # as `transformers` counts Mamba2ForCausalLM of these sizes, the second by its default config
    "mamba2-130m": 128_989_632,
    "mamba-codestral-7b": 7_285_403_648,
    # with two numbers a layer that are no parameters there
    "apertus-8b": 8_053_338_176 + 2 * 32,
    "apertus-70b": 70_599_864_480 + 2 * 80,
    "seed-oss-36b": 36_151_104_512,
    "command-r": 32_296_476_672,
    "command-r7b": 8_028_033_024,
    "command-a": 111_057_580_032,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "stablelm-2-1-6b": 1_644_515_328,
    "stablelm-2-12b": 12_143_185_920,
    "phi-1-5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "opt-125m": 125_239_296,
    "opt-1-3b": 1_315_758_080,
    "opt-2-7b": 2_651_596_800,
    "opt-6-7b": 6_658_473_984,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "phi3-medium": 13_960_238_080,
    # as their author counts
    "nanochat-d20": 560_988_160,
    "nanochat-d32": 1_879_048_192,
    "nanochat-d34": 2_217_082_880,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1-4b": 1_414_647_808,
    "pythia-2-8b": 2_775_208_960,
    "pythia-6-9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
}


# weights here, which no training changes
BUFFERS = ("layer_scalar", ".act_fn.beta", ".act_fn.eps")


@pytest.mark.parametrize("name", PRESETS)
def test_size_and_config(name):
    model = PRESETS[name]()
    config = model.hf.config(model)
    cls = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):  # shapes without memory
        theirs = cls(cls.config_class(**config))
    theirs.tie_weights()
    count = count_params(model.spec())
    fixed = sum(a.numel() for n, a in theirs.named_buffers() if n.endswith(BUFFERS))
    assert count == theirs.num_parameters() + fixed == PUBLISHED.get(name, count)
    assert model_from_config(config, "config.json") == model
    number, unit = PRESETS[name].__doc__.split(":")[0].split()
    scale = {"B": 1e9, "M": 1e6}[unit]
    assert f"{float(f'{count / scale:.3g}'):g}" == f"{float(number):g}"


def test_second_names_are_the_same_models():
    module = presets.of_section("model")
    assert module["qwen2.5-7b"] is module["qwen2-5-7b"] and module["phi-3-mini"]().kind == "phi3"


@pytest.mark.parametrize("name", PRESETS)
def test_windows_are_counted(name):
    """FLOPs of a step, by hand; the analytic plan takes every family."""
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS
    from lmwright.planner.analytic.memory import memory
    from lmwright.planner.analytic.step_time import timing

    model = PRESETS[name]()
    run = Run(
        name="t", dir="unused", model=model, objective=Clm(), data=Data(dir="unused"),
        optim=KINDS["adamw"](learning_rate=1e-3),
        train=Train(steps=1, global_batch_size=64, remat="block"), mesh=Mesh(fsdp=64),
    )  # fmt: skip
    machine = parse_machine("v5p-128")
    plan = on_paper(run, machine)
    t, keys = model.seq_len, 0
    for each, count in Counter(model.windows).items():
        window = each or t
        rows = range(0, t, max(1, t // 4096))  # evenly, as the mean over all is too slow
        wide = 1 if each else getattr(model, "global_head_dim", model.head_dim) / model.head_dim
        keys += count * wide * sum(min(i + 0.5, window) for i in rows) / len(rows)
    table = model.vocab_size * model.embed_dim
    vectors = model.num_layers * 8 * model.embed_dim  # norms and biases at most
    keys *= 2 if model.both_ways else 1
    attention = 12 * keys * model.num_heads * model.head_dim
    weights = count_params(model.spec()) - (table if model.head == "untied" else 0)
    if model.kind == "deberta":  # as many rows of distances as keys, of queries and of keys
        attention, weights = 2 * attention, weights - t * model.embed_dim
    if hasattr(model, "first_position"):  # rows of positions and types are looked up
        rows = model.first_position + model.seq_len + model.token_types
        weights -= rows * model.embed_dim
    if hasattr(model, "first_row"):  # of positions alone
        weights -= (model.first_row + model.seq_len) * model.embed_dim
    if getattr(model, "layer_input_dim", None):  # looked up
        weights -= model.vocab_size * model.num_layers * model.layer_input_dim
    if model.kind == "xlstm":  # a memory written and read, and half a chunk's tokens met
        k, h = model.key_dim, model.head_dim
        each = 2 * (k * h + k * h + model.chunk_tokens / 2 * (k + h))
        attention = 3 * each * model.num_layers * model.num_heads
    if model.kind == "lfm2":  # a filter, and two gates
        count = model.num_layers - len(model.windows)
        attention += 3 * 2 * count * (model.conv_tokens + 1) * model.embed_dim
    if count := sum(kind in ("mamba", "both") for kind in model.kinds):
        # memories read and written, half a chunk met, filters
        rows, width = model.mamba_state_dim, model.inner_dim
        met = model.chunk_tokens / 2 * (width + model.mamba_num_groups * rows)
        filters = model.conv_tokens * (width + 2 * model.mamba_num_groups * rows)
        attention += 3 * 2 * count * (2 * rows * width + met + filters)
    if model.kind in ("qwen3-5", "olmo-hybrid"):  # memories read twice and written, half a chunk
        count, (k, h), chunk = model.kinds.count("linear"), model.memory_dims, model.chunk_tokens
        keys, values = model.linear_num_key_heads, model.linear_num_value_heads
        met = chunk / 2 * (2 * keys * k + 2 * values * h)  # of keys and queries; of values, twice
        inverted = values * chunk**2 / 6
        attention += 3 * 2 * count * (3 * values * k * h + met + inverted)
    found = plan.flops_per_step / plan.tokens_per_step
    assert found == pytest.approx(6 * weights + attention, rel=3e-3, abs=6 * vectors)
    layout = Layout.of(plan)
    assert timing(layout, machine).step_s > 0 and memory(layout).peak > 0


def test_a_pattern_of_layers_is_reckoned_like_its_layers():
    """Two kinds of layers of one size need what as many layers of one kind do."""
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS
    from lmwright.planner.analytic.memory import memory
    from lmwright.planner.analytic.step_time import timing

    machine, found = parse_machine("v5p-128"), []
    for pattern in (("local", "global"), ("global",)):
        model = replace(PRESETS["gemma2-9b"](), window=8192, layer_pattern=pattern)
        for remat in ("none", "dots", "mlp", "block"):
            run = Run(
                name="t", dir="unused", model=model, objective=Clm(), data=Data(dir="unused"),
                optim=KINDS["adamw"](learning_rate=1e-3), mesh=Mesh(fsdp=32, tensor=2),
                train=Train(steps=1, global_batch_size=64, remat=remat),
            )  # fmt: skip
            layout = Layout.of(on_paper(run, machine))
            found.append((memory(layout).parts(), timing(layout, machine).by_kind))
    for two, one in zip(found[:4], found[4:], strict=True):
        assert two[0] == pytest.approx(one[0]) and dict(two[1]) == pytest.approx(dict(one[1]))


@pytest.mark.parametrize(
    "name, layers, whole",  # millions of weights of the encoder, and with its embedding
    [
        ("deberta-v3-xsmall", 21.5, 70.7),
        ("deberta-v3-small", 42.9, 141.3),
        ("deberta-v3-base", 85.5, 183.8),
        ("deberta-v3-large", 302.8, 434.0),
        ("mdeberta-v3-base", 85.5, 278.2),
    ],
)
def test_counts_of_deberta(name, layers, whole):
    model = PRESETS[name]()
    spec = model.spec()
    head = {n: param for n, param in model.head_weights(spec).items() if n != "embed"}
    table = model.vocab_size * model.embed_dim
    encoder = count_params(spec) - count_params(head)
    assert (round((encoder - table) / 1e6, 1), round(encoder / 1e6, 1)) == (layers, whole)
