"""Links of a group: the torus axes that it spans, and whether they are rings."""

import pytest

from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.links import links_of, transfer_s


@pytest.mark.parametrize(
    "name, group, links",
    [
        ("v4-128", 64, 6),  # 4x4x4, all rings
        ("v4-128", 16, 4),
        ("v4-32", 16, 3),  # 2x2x4: too small to close
        ("v5p-256", 8, 2),  # the long axis of 4x4x8
        ("v5e-256", 256, 4),
        ("v5e-256", 16, 2),
        ("v6e-8", 8, 2),
        ("v5e-128", 128, 3),  # 8x16: only the side of 16 closes
        ("v5e-256", 32, 1),  # spans no whole axes
        ("v3-8", 8, 1.0),  # two devices share the two links of a corner
    ],
)
def test_links_by_torus_axes(name, group, links):
    assert links_of(group, parse_slice(name)) == links


def test_all_to_all_is_bound_by_the_middle_of_the_longest_axis():
    text = (
        "ENTRY %m (p: f32[16,8]) -> f32[16,8] {\n  %p = f32[16,8]{1,0} parameter(0)\n"
        "  ROOT %x = f32[16,8]{1,0} all-to-all(%p), replica_groups=[1,16]<=[16]\n}"
    )
    main = parse(text).computations["m"]
    # a ring of 16: eight send half of their 512 bytes over the two links to the other eight
    seconds = transfer_s("all-to-all", main.root, main, parse_slice("v5e-256"), 1e9)
    assert seconds == pytest.approx(8 * (512 / 2) / 2 / 1e9)


def test_of_a_round_of_rows_as_many_travel_as_usually_are_there():
    text = (
        "ENTRY %m (p: f32[64,8], q: f32[16,8]) -> f32[16,8] {\n"
        "  %p = f32[64,8]{1,0} parameter(0)\n  %q = f32[16,8]{1,0} parameter(1)\n"
        "  ROOT %x = f32[16,8]{1,0} ragged-all-to-all(%p, %q), replica_groups=[1,16]<=[16], "
        'metadata={op_name="step/rounds_3_75/while/body/ragged_all_to_all"}\n}'
    )
    main = parse(text).computations["m"]
    seconds = transfer_s("ragged-all-to-all", main.root, main, parse_slice("v5e-256"), 1e9)
    assert seconds == pytest.approx(0.75 * 8 * (512 / 2) / 2 / 1e9)
