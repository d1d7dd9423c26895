"""Weights that compute rounded ([qat]) over devices give the gradients of one: a group may lie on
several of them."""

from dataclasses import replace
from functools import cache

import pytest

from lmwright.program.qat_section import Qat
from tests.sharded.problem import assert_same, gradients, make_run

QAT = Qat(weights="int4", group_size=8)


def run_of(axes=None, **train):
    return replace(make_run(axes, **train), qat=QAT)


@cache
def alone():
    return gradients(run_of())


@pytest.mark.parametrize(
    "axes, train",
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, {"num_microbatches": 2, "remat": "dots"}),
        pytest.param(
            {"stage": 2, "context": 2, "tensor": 2}, {"num_microbatches": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param({"data": 2, "fsdp": 4}, {"mlp_chunk_tokens": 16}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_gradients(axes, train):
    assert_same(gradients(run_of(axes, **train)), alone())
