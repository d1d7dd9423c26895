"""Run files for the tests of plan, and a model small enough to trace."""

from lmwright.formats.open import load_run

RUN = """
name = "r"
dir = "runs/r"
recipe = "pretrain"
[model]
preset = "{preset}"
[data]
dir = "data"
sources = [{{path = "text"}}]
[train]
steps = 1000
global_batch_size = {batch}
"""

# all dimensions different; 3 x 32 and 2 x 16 are cut by nothing larger than 2
SMALL = (
    "model.vocab_size=512", "model.embed_dim=96", "model.mlp_dim=320", "model.num_layers=5",
    "model.num_heads=6", "model.num_kv_heads=2", "model.head_dim=128", "model.seq_len=256",
    "data.tokenizer.vocab_size=512",
)  # fmt: skip


def run_of(folder, *overrides, preset="kisoku-3b", batch=128):
    """The run of a file in `folder`, which is written."""
    path = folder / "run.toml"
    path.write_text(RUN.format(preset=preset, batch=batch))
    return load_run(path, overrides)
