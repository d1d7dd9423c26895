"""Kernels and precision where no run says so: the platform's, said, and with the same results."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.run import Tokenizer
from lmwright.core.compute import Compute
from lmwright.core.param import map_params
from lmwright.data.tokens.tokenizer import train_tokenizer
from lmwright.evals.compute import decode_compute, row_compute
from lmwright.evals.generate import generate
from lmwright.evals.text import evaluate_text
from lmwright.nn import attention
from lmwright.nn.cached_attention import cached_attention
from tests.evals.small_model import GREEDY, MODEL, PROMPTS


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat"] * 30, Tokenizer(vocab_size=300))


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(3)
    return map_params(
        lambda p: rng.standard_normal(p.shape).astype("f4") * 0.3 + (p.fill or 0), MODEL.spec()
    )


def test_layers_apart_write_the_same_text(weights, tokenizer):
    """So that the choice between the two, which is one of speed, is seen by nobody."""
    found = {}
    for name, line in (
        ("reference", Compute()),
        ("scanned", Compute(kernels="cpu")),
        ("apart", Compute(kernels="cpu", unroll=True)),
    ):
        out = generate(MODEL, weights, tokenizer, PROMPTS, GREEDY, line)
        found[name] = [one.tokens for one in out]
    assert found["scanned"] == found["reference"] == found["apart"]
    assert all(found["apart"])


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_one_query_sees_what_the_reference_sees(soft_cap):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 6, 10)).astype("f4") * 3
    k, v = (rng.standard_normal((2, 17, 3, 10)).astype("f4") for _ in "kv")
    mask = rng.random((2, 1, 17)) < 0.5
    scoring = attention.Scoring(0.4, soft_cap=soft_cap)
    found = jax.jit(cached_attention, static_argnums=4)(q, k, v, mask, scoring)
    expected = attention.masked_attention(q, k, v, mask, scoring)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_no_matrix_of_all_scores_unless_asked_for(weights, tokenizer, monkeypatch):
    ids = np.random.default_rng(1).integers(0, 300, 200).tolist()
    expected = evaluate_text(MODEL, weights, ids, context=96, compute=Compute())

    reference = attention.masked_attention

    def refuse(q, *args, **options):
        assert q.shape[1] == 1, "whole score matrices"
        return reference(q, *args, **options)

    monkeypatch.setattr(attention, "masked_attention", refuse)
    found = evaluate_text(MODEL, weights, ids, context=96, compute=row_compute("fp32"))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    # one prompt of another shape: nothing compiled before serves it
    generate(MODEL, weights, tokenizer, [list(range(3, 40))], GREEDY)


def test_what_is_fastest_is_chosen(weights, monkeypatch):
    for has_amx, rows in ((False, "fp32"), (True, "bf16")):
        monkeypatch.setattr("lmwright.evals.compute.has_amx", lambda has=has_amx: has)
        assert row_compute() == Compute(precision=rows, kernels="cpu")
    assert row_compute("fp32", "reference") == Compute()
    large = {"w": jax.ShapeDtypeStruct((30_000_000_000,), jnp.float32)}
    assert decode_compute(MODEL, large, 100).unroll
    assert decode_compute(MODEL, weights, 100) == Compute(kernels="cpu")
    for kind, precision in (("NVIDIA L4", "bf16"), ("Tesla T4", "fp32")):
        device = SimpleNamespace(platform="gpu", device_kind=kind)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert row_compute().precision == precision
        assert decode_compute(MODEL, weights, 100).precision == precision
        assert not decode_compute(MODEL, weights, 100).unroll
        assert decode_compute(MODEL, large, 100).unroll
        assert not decode_compute(MODEL, large, 100, kernels="reference").unroll


def test_the_commands_say_it_and_take_options(shared_data, tmp_path, capsys, monkeypatch):
    stories = str(shared_data / "models" / "stories260k")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, Lily went to the park. She saw a big dog. " * 9)
    monkeypatch.setattr("lmwright.evals.compute.has_amx", lambda: False)
    losses = {}
    for options, says in (
        ((), "fp32, cpu kernels"),
        (("--kernels", "reference"), "fp32, reference kernels on cpu"),
    ):
        assert main(["eval", stories, "--text", str(text), "--context", "64", *options]) == 0
        *_, row, line = capsys.readouterr().out.splitlines()
        assert line == says
        losses[says] = float(row.split()[2])
    assert losses["fp32, cpu kernels"] == losses["fp32, reference kernels on cpu"]
    words = ["--max-new-tokens", "3", "--precision", "bf16", "--kernels", "reference"]
    assert main(["generate", stories, "--prompt", "Once", *words]) == 0
    assert "bf16, reference kernels on cpu]" in capsys.readouterr().err


@pytest.mark.slow  # the other halves of the above
def test_bf16_is_near_and_text_by_default(shared_data, tmp_path, capsys, monkeypatch):
    stories = str(shared_data / "models" / "stories260k")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, Lily went to the park. She saw a big dog. " * 9)
    monkeypatch.setattr("lmwright.evals.compute.has_amx", lambda: False)
    losses = []
    for options, says in (
        ((), "fp32, cpu kernels"),
        (("--precision", "bf16"), "bf16, cpu kernels"),
    ):
        assert main(["eval", stories, "--text", str(text), "--context", "64", *options]) == 0
        *_, row, line = capsys.readouterr().out.splitlines()
        assert line == says
        losses += [float(row.split()[2])]
    assert losses[1] == pytest.approx(losses[0], abs=0.03)
    assert main(["generate", stories, "--prompt", "Once", "--max-new-tokens", "3"]) == 0
    assert "fp32, cpu kernels]" in capsys.readouterr().err
