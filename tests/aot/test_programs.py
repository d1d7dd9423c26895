"""Train steps compile to the programs of golden/programs.json, names and order left out.

After a change that is meant: `python -m tests.aot.programs make CASE`, and read the diff. The first
cases are compared where other tests compile them, with `programs.check`.
"""

import json

import pytest

from tests.aot import programs
from tests.aot.programs import CASES, GOLDEN, ROOT, SHARED, check, difference, plan_apart, summary
from tests.aot.slices import needs_libtpu


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", [name for name in CASES if name not in SHARED])
def test_a_step_compiles_to_the_golden_program(name):
    if name not in json.loads(GOLDEN.read_text())["programs"]:
        pytest.skip("no golden program yet: make it with programs.py")
    check(name, plan_apart(ROOT / "src", name))


HLO = """
HloModule jit_step
%add.1 (a.2: f32[], b.3: f32[]) -> f32[] {
  %a.2 = f32[]{:T(128)} parameter(0), metadata={op_name="x"}
  ROOT %sum.4 = f32[]{:T(128)} add(%a.2, %a.2)
}
ENTRY %main {
  %p = (bf16[8,16]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[4]{0}) parameter(0)
}
"""


def test_programs_of_another_compiler_are_not_taken_for_equal(monkeypatch):
    monkeypatch.setattr(programs.importlib.metadata, "version", lambda _: "0.0.1")
    with pytest.raises(pytest.skip.Exception, match=r"libtpu 0\.\S+, and 0.0.1 is installed"):
        check(SHARED[0], {})


def test_every_golden_program_has_instructions():
    made = json.loads(GOLDEN.read_text())["programs"]
    assert [name for name, program in made.items() if not program["opcodes"]] == []


def test_names_and_the_order_of_arguments_do_not_count():
    swapped = HLO.replace("%p = (bf16[8,16]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[4]{0})",
                          "%q.7 = (f32[4]{0}, bf16[8,16]{1,0:T(8,128)(2,1)S(1)})")  # fmt: skip
    assert swapped != HLO and summary(swapped, 1, 2.0) == summary(HLO, 1, 2.0)
    assert summary(HLO, 1, 2.0)["opcodes"] == {"add": 1, "parameter": 2}


def test_layouts_count():
    other = HLO.replace("{1,0:T", "{0,1:T")
    told = difference(summary(HLO, 1, 2.0), summary(other, 3, 2.0))
    assert told == "peak_bytes 1, now 3; other shapes or layouts"
