"""Runs that docs/gpu.md promises the same bits, each twice in a process of its own."""

import pytest

from tests.card.test_curves import CUDA, NARROW
from tests.golden.curves import ROOT, differences, train_apart

pytestmark = pytest.mark.slow

NAMES = ("family llama", "lora one", "objective sft")


@pytest.mark.parametrize("rows", ["document", "row"])
@pytest.mark.parametrize("with_cache", [False, True], ids=["by rule", "by the cache"])
def test_two_runs_are_equal_bit_for_bit(with_cache, rows, tmp_path):
    """Without timing of kernels, or with the kernels that the first one chose."""
    option = "exclude_nondeterministic_ops" if with_cache else "deterministic_ops"
    changes = (*NARROW, f'train.compiler_options.xla_gpu_{option}="True"')
    changes += (f"data.pack.attention={rows}",)
    names = NAMES if rows == "document" else NAMES[:2]  # examples never share a row
    variables = CUDA | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    one, other = (
        train_apart(
            ROOT / "src", names, changes, **variables,
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / ("kept" if with_cache else f"cache-{run}")),
        )
        for run in range(2)
    )  # fmt: skip
    assert not differences(one, other)


def test_float8_learns_as_bfloat16(card):
    """Within what three bits of a number cost in twenty steps."""
    if float(card.compute_capability) < 8.9:
        pytest.skip("this card does not multiply in float8")
    names = ("family llama", "objective sft")
    float8 = ("train.precision=fp8", *NARROW[1:], "model.embed_dim=64", "model.mlp_dim=96")
    wide = train_apart(ROOT / "src", names, (*NARROW, *float8[-2:]), **CUDA)
    narrow = train_apart(ROOT / "src", names, float8, **CUDA)
    losses = [{case: {"train.loss": curve["train.loss"]} for case, curve in curves.items()}
              for curves in (wide, narrow)]  # fmt: skip
    assert not differences(*losses, 5e-2)
