"""Layers of several kinds: every layer is in one place, and the pattern is found."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.core.compute import REMATS
from lmwright.core.cuts import fewest
from lmwright.core.stack import run_stack, spans


@pytest.mark.parametrize(
    "kinds, want",
    [
        ("aaaa", [("layers", "a", 4)]),
        ("a", [("layers", "a", 1)]),
        ("lg" * 21, [("layers", "lg", 21)]),
        ("lllllg" * 4 + "ll", [("layers", "lllllg", 4), ("layers_from_24", "l", 2)]),
        ("d" + "m" * 26, [("layers_from_0", "d", 1), ("layers", "m", 26)]),
        ("ddd" + "mmmr" * 6, [("layers_from_0", "d", 3), ("layers", "mmmr", 6)]),
        # LFM2, whose checkpoints have these spans, though two patterns would be a place less
        ("ccfccfccfcfcfcfc", [
            ("layers_from_0", "c", 2), ("layers_from_2", "f", 1), ("layers_from_3", "c", 2),
            ("layers_from_5", "f", 1), ("layers_from_6", "c", 2), ("layers", "fc", 4)]),
        # Nemotron 3 Nano, in no regular order
        ("memem*e" * 5 + "mememem*ememememe", [
            ("layers", "memem*e", 5), ("layers_from_35", "me", 3), ("layers_from_41", "m", 1),
            ("layers_from_42", "*", 1), ("layers_from_43", "em", 4), ("layers_from_51", "e", 1)]),
    ],
)  # fmt: skip
def test_known_models(kinds, want):
    assert [(s.name, "".join(s.kinds), s.repeats) for s in spans(tuple(kinds))] == want


@settings(deadline=None)
@given(st.text("lgm", min_size=1, max_size=40))
def test_every_layer_has_one_place_of_its_kind(kinds):
    found = spans(tuple(kinds))
    layers = {i: kind for span in found for _, kind, numbers in span.places() for i in numbers}
    assert "".join(layers[i] for i in range(len(kinds))) == kinds
    assert sum(span.num_layers for span in found) == len(kinds)
    assert len({path for span in found for path, *_ in span.places()}) == sum(
        len(span.kinds) for span in found
    )
    assert sum(span.name == "layers" for span in found) == 1


@settings(deadline=None)
@given(st.text("ab", min_size=1, max_size=11), st.integers(1, 4))
def test_no_other_way_has_fewer_places(kinds, longest):
    """Against all ways to cut, one after the other."""

    def least(rest):
        found = [0] if not rest else []
        for length in range(1, min(longest, len(rest)) + 1):
            end = 0
            while rest[end : end + length] == rest[:length]:
                end += length
                if length == 1 or end > length:
                    found.append(length + least(rest[end:]))
        return min(found)

    cuts = fewest(tuple(kinds), longest)
    assert "".join("".join(pattern) * repeats for pattern, repeats in cuts) == kinds
    assert sum(len(pattern) for pattern, _ in cuts) == least(kinds)
    assert all(len(pattern) <= longest for pattern, _ in cuts)


def test_a_lone_layer_is_computed_again_behind_a_barrier():
    """XLA takes its loop of one round apart, and would keep the results of the forward pass."""

    def loss(w, x):
        return jnp.sum(run_stack([lambda w, x: (x @ w, {})], w, x, remat=REMATS["block"])[0])

    def program(num_layers):
        return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((num_layers, 4, 4)), jnp.ones((2, 4))))

    assert "prevent_cse=True" in program(1)
    assert "prevent_cse=False" in program(3)
