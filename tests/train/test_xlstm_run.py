"""Recurrent models by the command line: trained in two sessions, exported, generating text."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.formats.load import load_model
from lmwright.formats.proof import logits
from tests.train.texts import write_run, write_texts

SIZES = """
vocab_size = 320
embed_dim = 32
mlp_dim = 64
num_layers = 2
num_heads = 2
seq_len = 64
chunk_tokens = 16
"""
MODELS = {
    "xlstm": "kind = 'xlstm'\nkey_dim = 8\nhead_dim = 16",
    "xlstm-blocks": "kind = 'xlstm-blocks'\nblock_pattern = ['slstm', 'mlstm']",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_whole_way(kind, tmp_path, capsys):
    write_texts(tmp_path / "text.jsonl")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    path = write_run(
        tmp_path, SIZES + MODELS[kind], recipe="pretrain-xlstm", train="",
        more="[optim.schedule]\nwarmup_steps = 1\ncooldown_steps = 1",
    )  # fmt: skip
    assert main(["prepare", path]) == 0
    assert main(["train", path]) == 0
    assert main(["train", path, "train.steps=6"]) == 0
    assert main(["export", run, out, "--dtype", "fp32"]) == 0
    trained, exported = load_model(run), load_model(out)
    ids = np.random.default_rng(0).integers(0, 320, (1, 33)).astype(np.int32)
    found = [logits(each.model, each.load(dtype=jnp.float32), ids) for each in (trained, exported)]
    np.testing.assert_array_equal(*found)
    capsys.readouterr()
    assert main(["generate", out, "--prompt", "the cat", "--max-new-tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert main(["export", run, str(tmp_path / "m.gguf")]) == 2
    assert "GGUF" in capsys.readouterr().err and not (tmp_path / "m.gguf").exists()
