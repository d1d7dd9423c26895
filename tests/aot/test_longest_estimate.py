"""The estimate of memory against the TPU compiler's, for long rows with adapters, windows and
chunks: what `--longest --quick` decides by."""

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler.compile import compile_for
from tests.aot.slices import needs_libtpu, run_of

SLICE = "v5e:1x1"
SMALL = (  # a pattern of three places, twice
    "model.num_layers=6", 'model.layer_pattern=["local", "local", "global"]',
    "model.embed_dim=384", "model.mlp_dim=2304", "model.head_dim=128", "model.window=512",
    "model.vocab_size=1024", "data.tokenizer.vocab_size=1024",
)  # fmt: skip


@pytest.mark.slow  # a minute each
@needs_libtpu
@pytest.mark.parametrize("chunk", [4096, None])
def test_adapters_windows_and_chunks(chunk, tmp_path):
    words = [*SMALL, "lora.rank=8", "train.remat=block", "train.loss_chunk_tokens=512"]
    words += [f"{name}.seq_len=65536" for name in ("model", "data.pack")]
    words += [f"train.mlp_chunk_tokens={chunk}"] if chunk else []
    run = run_of(tmp_path, *words, preset="gemma3-1b", batch=1)
    found = compile_for(run, parse_slice(SLICE))
    quick = Quick.of(run, parse_machine(SLICE))
    assert quick.memory.peak == pytest.approx(found.peak_bytes, rel=0.15)
