"""A small model's weights: every kind of arrow, all sizes different, layers stacked."""

import jax
import numpy as np
import pytest

from lmwright.core.param import Param, init_weights, map_params, stack

L, D, N, H, F, V, E = 3, 24, 4, 10, 40, 56, 2


@pytest.fixture(scope="session")
def layer():
    return {
        "q": Param("embed -> heads head_dim", (D, N, H)),
        "o": Param("heads head_dim -> embed", (N, H, D)),
        "up": Param("[experts] embed -> mlp", (E, D, F)),
        "down": Param("[experts] mlp -> embed", (E, F, D)),
        "norm": Param("norm", (D,), fill=1.0),
    }


@pytest.fixture(scope="session")
def spec(layer):
    return {
        "embed": Param("vocab -> embed", (V, D)),
        "head": Param("embed -> vocab", (D, V)),
        "norm": Param("norm", (D,), fill=1.0),
        "layers": stack(layer, L),
    }


@pytest.fixture(scope="session")
def weights(spec):
    return init_weights(spec, jax.random.key(0))


@pytest.fixture(scope="session")
def gradients(spec):
    """gradients(step): the same for the same step, of very different sizes by weight."""

    def make(step):
        rng = np.random.default_rng(step)
        return map_params(
            lambda p: (rng.normal(size=p.shape) * 10 ** rng.uniform(-3, 0)).astype("float32"), spec
        )

    return make
