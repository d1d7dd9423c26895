"""Every preset's train step compiles for a slice that holds it; an hour and a half."""

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import machine_of
from lmwright.planner.analytic.quick import MEMORY_ERROR_SHARE, Quick
from lmwright.planner.compiler.compile import compile_for
from lmwright.presets import of_section
from tests.aot.slices import needs_libtpu, run_of

ROW = 4096  # tokens, where the model takes as many
SLICES = {
    "v5e-8": """llama-500k llama-1m llama-5m llama-15m llama-42m llama-135m llama-360m llama-1b
        llama-3b kisoku-3b llama-3-2-1b llama-3-2-3b qwen2-5-0-5b qwen2-5-1-5b qwen2-5-3b qwen3-0-6b
        qwen3-1-7b qwen3-4b gemma2-2b gemma3-1b olmo2-1b phi3-mini moe-6m smollm3-3b
        gemma-2b vaultgemma-1b granite-3-3-2b qwen3-5-0-8b qwen3-5-2b ministral-3-3b
        lfm2-350m lfm2-700m lfm2-1-2b granite-4-0-h-350m granite-4-0-h-1b falcon-h1-0-5b
        ernie-4-5-0-3b hunyuan-1-8b exaone-4-0-1-2b helium-1-preview-2b granite-3-1-1b-a400m
        eurobert-210m eurobert-610m eurobert-2-1b modernbert-base modernbert-large ettin-17m
        ettin-32m ettin-68m ettin-150m ettin-400m ettin-1b deberta-v3-xsmall deberta-v3-small
        deberta-v3-base deberta-v3-large mdeberta-v3-base xlstm-7m xlstm-165m xlstm-1-3b xlstm-2-7b
        bert-base bert-large minilm-l6 roberta-base roberta-large xlm-roberta-base xlm-roberta-large
        bitnet-500k bitnet-5m bitnet-b1-58-2b-4t fanformer-1b xlstm-7-1-164m
        mamba2-130m gpt2-small gpt2-medium gpt2-large gpt2-xl nanochat-d20 nanochat-d32 nanochat-d34
        ettin-decoder-17m ettin-decoder-32m ettin-decoder-68m ettin-decoder-150m
        ettin-decoder-400m ettin-decoder-1b
        pythia-70m pythia-160m pythia-410m pythia-1b pythia-1-4b pythia-2-8b
        phi-1-5 phi-2 olmo-1b stablelm-2-1-6b starcoder2-3b opt-125m opt-1-3b opt-2-7b""",
    "v5e-16": """llama-7b llama-8b llama-3-1-8b mistral-7b qwen2-5-7b olmo2-7b olmo3-7b olmoe-1b-7b
        llada-8b xlstm-7b granite-3-3-8b qwen3-5-4b gemma4-e2b gemma4-e4b pythia-6-9b
        ministral-3-8b trinity-nano lfm2-8b-a1b lfm2-2-6b granite-4-0-h-micro granite-4-0-h-tiny
        granite-3-1-3b-a800m
        starcoder2-7b olmo-7b olmo-hybrid-7b opt-6-7b mamba-codestral-7b""",
    "v4-32": """llama-13b qwen2-5-14b qwen3-8b qwen3-14b gemma2-9b gemma3-4b gemma3-12b olmo2-13b
        phi3-medium qwen3-5-9b ministral-3-14b pythia-12b glm-4-9b nemotron-nano-9b-v2
        apertus-8b gemma-7b falcon-h1-7b bamba-9b command-r7b stablelm-2-12b""",
    "v5p-16": """qwen2-5-32b qwen3-32b gemma2-27b gemma3-27b olmo2-32b olmo3-32b qwen3-30b-a3b
        qwen3-5-27b gemma4-31b exaone-4-0-32b seed-oss-36b mistral-small-3-2-24b cwm-32b
        qwen1-5-moe-a2-7b mellum2-12b-a2-5b deepseek-v2-lite moonlight-16b-a3b
        nemotron-3-nano-30b-a3b ernie-4-5-21b-a3b trinity-mini command-r starcoder2-15b""",
    "v5p-32": "granite-4-0-h-small qwen3-5-35b-a3b gpt-oss-20b gemma4-26b-a4b glm-4-7-flash",
    "v5p-64": "llama-34b llama-70b llama-3-1-70b qwen2-5-72b mixtral-8x7b apertus-70b phi-3-5-moe",
    "v5p-128": """llama-175b gpt-oss-120b glm-4-5-air qwen3-next-80b-a3b
        nemotron-3-super-120b-a12b mistral-small-4-119b solar-open-100b hunyuan-a13b command-a
        llama-4-scout""",
    "v5p-256": "minimax-m2 k-exaone-236b-a23b",
    "v5p-512": "deepseek-v3 llama-4-maverick",
    "v5p-1024": "llama-600b",
}
CASES = {name: where for where, names in SLICES.items() for name in names.split()}


def test_every_preset_is_in_the_table():
    """Second names of the same model aside."""
    rows = of_section("model")
    assert set(rows.values()) == {rows[name] for name in CASES} and len(CASES) == len(
        set(rows.values())
    )


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("preset", CASES)
def test_a_preset_compiles_and_fits(preset, tmp_path):
    where = parse_slice(CASES[preset])
    model = of_section("model")[preset]()
    seq_len = min(ROW, model.seq_len)
    lengths = (f"model.seq_len={seq_len}", f"data.pack.seq_len={seq_len}")
    batch = where.num_devices
    kind = "diffusion" if model.fills_masks else "mlm"
    masked = (f"objective.kind={kind}",) if model.both_ways else ()
    run = run_of(tmp_path, "train.remat=block", *lengths, *masked, preset=preset, batch=batch)
    quick, found = Quick.of(run, machine_of(where)), compile_for(run, where)
    assert found.fits and found.tokens_per_step == batch * seq_len
    assert quick.memory.weights == found.weights_bytes
    # what the runtime keeps beside the run is worth nothing but to the smallest
    near = pytest.approx(found.peak_bytes, rel=MEMORY_ERROR_SHARE, abs=128 << 20)
    assert quick.memory.peak == near
