"""Impossible meshes are refused with the reason and the nearest that are possible."""

import jax
import pytest

from lmwright.core.sharding import slices_of
from lmwright.errors import UserError
from lmwright.program.plan import resolve
from tests.sharded.problem import make_run


@pytest.mark.parametrize(
    ("axes", "change", "says"),
    [
        ({"tensor": 3}, {}, "mesh: asks for 3 devices, and there are 8; .* (nearest: 2)"),
        (
            {"tensor": 8},
            {"model": {"num_heads": 12, "num_kv_heads": 4}},
            "mesh.tensor: 8 does not divide the 4 of axis 'kv_heads' "
            "('[layers] embed -> kv_heads head_dim'); on 8 devices the nearest that do: 2, 4",
        ),
        (
            {"context": 8},
            {"model": {"seq_len": 60}},
            "mesh.context: 8 does not divide the 60 tokens of a row (data.pack.seq_len); "
            "on 8 devices the nearest that do: 2, 4",
        ),
        (
            {"context": 2, "tensor": 4},
            {"model": {"seq_len": 60}},
            "mesh.context x mesh.tensor: 8 does not divide the 60 tokens of a row",
        ),
        (
            {"context": 4, "data": 2},
            {"model": {"seq_len": 60}},
            "mesh.context: 4 does not divide the 30 pairs of tokens of a row, which ring attention",
        ),
        (
            {"stage": 8},
            {},
            "mesh.stage: 8 does not divide the 2 of axis 'layers'",
        ),
        (
            {"fsdp": 4, "expert": 2},
            {"model": {"embed_dim": 20}},
            "mesh.fsdp x mesh.expert: 8 does not divide the 20 of axis 'embed'",
        ),
        (
            {"context": 4, "tensor": 2},
            {"context_attention": "all_to_all", "model": {"num_heads": 12, "num_kv_heads": 4}},
            "mesh.context x mesh.tensor: 8 does not divide the 12 of model.num_heads, which "
            'train.context_attention = "all_to_all" trades for tokens ("ring" does not)',
        ),
        (
            {"data": 4, "fsdp": 2},
            {"global_batch_size": 36},
            "train.global_batch_size: 36 rows do not divide over 8 devices; "
            "use a multiple of 8 (nearest: 32 or 40)",
        ),
    ],
)
def test_impossible_meshes(axes, change, says):
    model = change.get("model")
    train = {name: value for name, value in change.items() if name != "model"}
    with pytest.raises(UserError) as refused:
        resolve(make_run(axes, model, **train), jax.devices())
    text = str(refused.value)
    assert "\n" not in text
    parts = says.split(" .* ")
    assert all(part in text for part in parts), text


def test_only_data_and_stage_cross_slices():
    whole = {"data": 1, "stage": 1, "fsdp": 8, "expert": 1, "context": 1, "tensor": 1}
    assert slices_of(whole, 1) == {"data": 1, "stage": 1}
    assert slices_of(whole | {"data": 4}, 2) == {"data": 2, "stage": 1}
    assert slices_of(whole | {"stage": 4}, 2) == {"data": 1, "stage": 2}
    assert slices_of(whole | {"data": 2, "stage": 2}, 4) == {"data": 2, "stage": 2}
    with pytest.raises(UserError, match=r"^mesh.data: 1 and .* over 2 slices.*mesh.data=2$"):
        slices_of(whole, 2)
    with pytest.raises(UserError, match=r"over 4 slices.*nearest: mesh.data=2$"):
        slices_of(whole | {"stage": 2}, 4)
    with pytest.raises(UserError, match=r"mesh.data=12$"):
        slices_of(whole | {"data": 3}, 4)
