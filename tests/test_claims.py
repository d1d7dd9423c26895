"""docs/internals/claims.md: what stands beside the published figures is what the commands say."""

import re
import shlex
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run
from lmwright.hardware.chips import CHIPS
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "internals" / "claims.md").read_text()
COMMANDS = dict(re.findall(r"^    ([A-Z])  lmwright (.+)$", PAGE, re.M))


def quick(letter):
    """The analytic answer to a command of `plan`."""
    words = shlex.split(COMMANDS[letter])
    overrides = [word for word in words[2:] if "=" in word]
    run = load_run(ROOT / words[1], overrides)
    on = words[words.index("--on") + 1] if "--on" in words else run.plan.on
    return Quick.of(run, parse_machine(on))


def test_every_row_has_its_command():
    rows = [line.split("|")[3].strip() for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 9 and set(rows) - {"-"} == set(COMMANDS)
    for text in COMMANDS.values():
        verb, subject = text.split()[:2]
        assert verb in ("params", "plan", "eval")
        assert not subject.startswith("examples/") or (ROOT / subject).is_file()


def test_parameters_and_cache(capsys):
    assert main(shlex.split(COMMANDS["A"])) == 0
    said = capsys.readouterr().out
    for figure in ("3,325,627,392", "3,480,161,280", "98,304", "192", "768", "24"):
        assert figure in said and figure in PAGE
    assert main(shlex.split(COMMANDS["E"])) == 0
    total = int(re.findall(r"total, untied +([\d,]+)", capsys.readouterr().out)[0].replace(",", ""))
    assert total == pytest.approx(619e9, rel=1e-3)


def test_seconds_and_chip_hours():
    step = quick("B")
    flops, peak = step.plan.flops_per_step, CHIPS["v4"].peak.bf16_flops
    assert flops == pytest.approx(5.55e15, rel=1e-3)
    assert flops / 3.061 / (16 * peak) == pytest.approx(0.412, abs=5e-4)
    run = quick("C")
    hours = 100_000 * run.plan.flops_per_step / peak / 3600
    assert hours == pytest.approx(2241, rel=1e-3)
    assert hours / 0.412 == pytest.approx(5440, rel=2e-3)
    assert 100_000 * run.step_s / 3600 * 16 == pytest.approx(4465, rel=1e-3)


def test_a_step_of_long_rows():
    step = quick("D")
    least_s = step.plan.flops_per_step / (8 * CHIPS["v5e"].peak.bf16_flops)
    assert least_s == pytest.approx(12.7, abs=0.05) and 2.91 * least_s == pytest.approx(37, abs=0.5)
    lora = load_run(ROOT / "examples" / "gemma2-9b-32k-lora.toml")
    step = Quick.of(lora, parse_machine("v5e-8"))
    least_s = step.plan.flops_per_step / (8 * CHIPS["v5e"].peak.bf16_flops)
    assert least_s == pytest.approx(9.6, abs=0.05) and 2.91 * least_s == pytest.approx(28, abs=0.5)
