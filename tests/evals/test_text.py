"""Perplexity of a text in windows: by hand, and through the command on any kind of model."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.copies import computing_with, copies_shardings
from lmwright.core.param import map_params
from lmwright.errors import UserError
from lmwright.evals import text
from lmwright.evals.compute import row_compute
from lmwright.evals.text import encode_file, evaluate_text
from lmwright.formats import reference
from lmwright.formats.convert import export_command
from lmwright.formats.proof import logits
from lmwright.models.llama import Llama
from lmwright.nn.rope import LongRope

MODEL = Llama(
    vocab_size=29, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=32,
)  # fmt: skip


def by_hand(w, ids, context, stride):
    """Each token from the window that the picture says, one window at a time."""
    nll, seen, hits = [], 1, 0
    for start in range(0, len(ids) - 1, stride):
        window = ids[start : start + context + 1]
        x = logits(MODEL, w, np.asarray([window], np.int32))[0].astype(np.float64)
        logp = x - np.log(np.exp(x).sum(-1, keepdims=True))
        for i in range(1, len(window)):
            if start + i >= seen:
                nll.append(-logp[i - 1, window[i]])
                hits += window[i] == logp[i - 1].argmax()
        seen = start + len(window)
        if seen == len(ids):
            break
    return nll, hits


@pytest.mark.parametrize("count", [9, 50, 64])
@pytest.mark.parametrize("context, stride", [(16, 16), (16, 5), (32, 8)])
def test_windows(count, context, stride):
    rng = np.random.default_rng(0)
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.3, MODEL.spec())
    ids = rng.integers(0, 29, count).tolist()
    fp32 = row_compute("fp32")
    if stride != 16:  # on three devices, of which the last windows are fewer
        w = jax.device_put(w, copies_shardings(MODEL.spec(), 3))
    with computing_with(w), pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BATCH_TOKENS", 48)
        found = evaluate_text(MODEL, w, ids, context=context, stride=stride, compute=fp32)
    nll, hits = by_hand(w, ids, context, stride)
    assert found.tokens == len(nll)
    assert found.loss == pytest.approx(np.mean(nll), rel=1e-5)
    assert found.accuracy == pytest.approx(hits / len(nll))
    assert found.tokens == count - 1  # every token but the first


def test_a_context_of_the_original_length_has_the_rotations_of_short_rows():
    """As transformers, which turns to those of long rows behind it."""
    scaling = LongRope(
        factor=2.0, original_seq_len=16, short_factor=(1.0, 1.2, 1.5), long_factor=(2.0, 4.0, 9.0)
    )
    model, rng = replace(MODEL, rope_scaling=scaling), np.random.default_rng(1)
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.3, model.spec())
    ids = rng.integers(0, 29, 16)
    found = evaluate_text(model, w, ids.tolist(), context=16, compute=row_compute("fp32"))
    x = logits(model, w, ids[None].astype(np.int32))[0].astype(np.float64)
    logp = (x - np.log(np.exp(x).sum(-1, keepdims=True)))[np.arange(15), ids[1:]]
    assert found.loss == pytest.approx(-logp.mean(), rel=1e-5)


def test_what_does_not_fit():
    w = {}
    for options, says in (
        ({"context": 33}, "from 2 to the model's 32"),
        ({"context": 8, "stride": 9}, "stride"),
    ):
        with pytest.raises(UserError, match=says):
            evaluate_text(MODEL, w, [1, 2, 3], **options)
    with pytest.raises(UserError, match="has 1 tokens"):
        evaluate_text(MODEL, w, [1], context=8)


def test_a_byte_order_mark_is_no_text(tmp_path):
    class Bytes:
        prompt_prefix, tokenizer = (1,), SimpleNamespace(encode=lambda text: list(text.encode()))

    (tmp_path / "a.txt").write_bytes("\ufeffa\ufeff".encode())
    assert encode_file(Bytes, str(tmp_path / "a.txt")) == [1, *"a\ufeff".encode()]
    assert encode_file(Bytes, str(tmp_path / "a.txt"), max_chars=1) == [1, ord("a")]


def test_the_command_takes_every_form(shared_data, tmp_path, monkeypatch, capsys):
    """A folder and its GGUF file give the same table."""
    pytest.importorskip("gguf")
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)
    stories = shared_data / "models" / "stories260k"
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time, Lily went to the park. She saw a big dog. " * 30)
    export_command(stories, tmp_path / "s.gguf")
    capsys.readouterr()
    tables = []
    for path, devices in ((stories, "1"), (tmp_path / "s.gguf", "1"), (stories, "3")):
        words = ["eval", str(path), "--text", str(file), "--context", "128", "--max-chars", "900"]
        assert main([*words, "--devices", devices]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and "text.txt" in tables[0]
    assert tables[2] == tables[0].replace("kernels", "kernels, on each of 3 devices")
    assert main(["eval", str(stories)]) == 2
    assert "add --text FILE" in capsys.readouterr().err
    assert main(["eval", str(stories), "--stride", "4"]) == 2
    assert main(["eval", str(stories), "--text", str(tmp_path / "no.txt")]) == 2
