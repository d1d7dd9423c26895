"""Sampling filters equal transformers' warpers; draws follow the probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.errors import UserError
from lmwright.evals.decoding import knobs_of
from lmwright.evals.sampling import Sampling, choose, filter_logits
from tests.evals.small_model import MODEL

SETTINGS = (
    (0.7, 5, 1.0), (1.0, 61, 0.8), (1.9, 12, 0.5), (0.3, 61, 0.001), (1.0, 1, 0.9), (1.0, 61, 1.0),
)  # fmt: skip


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_filters_equal_transformers(temperature, top_k, top_p):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((7, 61))).astype("f4")
    logits[0, 10:20] = logits[0].max() + 1  # ten equal winners
    logits[1] = 0.0  # all equal
    if top_p < 1:
        logits = logits[2:]  # which of equal tokens top-p keeps is arbitrary
    scores = transformers.TemperatureLogitsWarper(temperature)(None, torch.tensor(logits))
    scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)
    knobs = np.float32(temperature), np.int32(top_k), np.float32(top_p)
    found = np.asarray(filter_logits(jnp.asarray(logits), *knobs))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(scores.numpy()))
    np.testing.assert_allclose(found, scores.numpy(), rtol=1e-6)


def test_a_top_k_above_the_vocabulary_keeps_all_tokens():
    logits = np.random.default_rng(0).standard_normal((2, MODEL.vocab_size)).astype("f4")
    settings = Sampling(temperature=1.0, top_k=2**40)
    found = filter_logits(jnp.asarray(logits), *knobs_of(settings, MODEL))
    np.testing.assert_allclose(found, logits, rtol=1e-6)


def test_a_stop_string_may_go_on_behind_a_special_token():
    """Special tokens are no part of the text, so that the token alone ends it."""

    class Tokenizer:
        eos_id, special_tokens = 1, {"<s>": 0, "</s>": 1, "<|im_start|>": 4, "<|im_end|>": 5}

    assert set(Sampling(stop=("<|im_end|>\n", "<|im", "x")).ends(Tokenizer)) == {1, 5}
    assert Sampling().ends(Tokenizer) == (1,)


@pytest.mark.parametrize("method", ["sampled", "filtered"])
def test_draws_follow_the_probabilities(method):
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05], jnp.float32))
    count = 20_000
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(count))
    knobs = np.float32(0.5), np.int32(3), np.float32(1.0)
    drawn = choose(jnp.broadcast_to(logits, (count, 4)), keys, method, *knobs)
    expected = np.array([0.5, 0.3, 0.15, 0.05]) ** 2  # temperature one half
    if method == "filtered":
        expected[3] = 0.0
    expected /= expected.sum()
    share = np.bincount(np.asarray(drawn), minlength=4) / count
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(share - expected) <= 4.5 * deviation).all()


def test_settings_are_checked():
    for wrong, says in (
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"temperature": -0.1}, "temperature: -0.1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p: 1.5"),
        ({"stop": ("a", "")}, "stop: an empty string ends no text; leave it out"),
        ({"seed": -1}, "seed: -1"),
    ):
        with pytest.raises(UserError, match=says):
            Sampling(**wrong)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--stop", ""], "--stop: an empty string ends no text; leave it out"),
        (["--block-tokens", "9", "--max-new-tokens", "8"], "x: is not there"),  # no setting
        (["--seed", "5000000000"], "--seed: 5000000000 must be from 0 to"),
    ],
)
def test_the_command_names_its_options(words, says, capsys):
    assert main(["generate", "x", "--prompt", "a", *words]) == 2
    assert f"error: {says}" in capsys.readouterr().err
