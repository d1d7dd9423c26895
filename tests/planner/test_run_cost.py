"""What a run takes, reckoned by hand."""

import json
from pathlib import Path

import jax
import pytest

from lmwright.errors import UserError
from lmwright.hardware.chips import CHIPS
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.cost import checkpoint_bytes, cost_of, disk, figure
from lmwright.planner.sessions import ASSUMED_SAVE_BYTES_PER_S, ASSUMED_START_S
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state, saved
from lmwright.report.summary import short
from tests.planner.runs import SMALL, run_of

V4 = parse_machine("v4-32")


def test_hours_chips_money_and_sessions(tmp_path):
    run = run_of(tmp_path, "train.steps=7200")
    found = cost_of(run, V4, 2.0, 1000, hours=3)
    assert (found.hours, found.chips, found.chip_hours) == (4.0, 16, 64.0)
    assert found.tokens == 7_200_000
    assert found.usd == pytest.approx(64 * CHIPS["v4"].price.on_demand)
    # less the margin, start-up and a save, as training does
    save_s = checkpoint_bytes(run) / ASSUMED_SAVE_BYTES_PER_S
    done = int((3 * 3600 - 600 - ASSUMED_START_S - save_s) / 2)
    assert 4900 < done < 5010
    assert (found.session.steps, found.session.tokens, found.session.sessions) == (
        done, 1000 * done, 2,
    )  # fmt: skip
    assert found.session.all_hours * 3600 == pytest.approx(
        7200 * 2 + 2 * (ASSUMED_START_S + save_s)
    )
    text = "\n".join(found.lines())
    assert "about 4 hours, 64 chip-hours" in text and "on demand, list of" in text
    assert f"3 hours: {done:,} of 7,200 steps (0.69 of the run)" in text
    limited = run_of(tmp_path, "train.steps=7200", "limits.session_hours=3", "limits.total_hours=4")
    assert cost_of(limited, V4, 2.0, 1000).session.sessions == 2
    assert "more than limits.total_hours = 4" in cost_of(limited, V4, 2.0, 1000).lines()[-1]
    assert json.loads(json.dumps(found.to_json()))["session"]["sessions"] == 2


def test_a_run_that_has_begun_tells_its_own_times(tmp_path):
    run = run_of(tmp_path, "train.steps=7200", f"dir={tmp_path}/begun")
    entry = {"began": 1.0, "seconds": 900.0, "first_step": 0, "last_step": 9}
    starts = [(100, 300), (50, 20), (60, 30)]
    sessions = [
        entry | {"spent": {"start": start, "compile": compiled, "step": 9.0}, "save_s": save}
        for (start, compiled), save in zip(starts, (40.0, 30.0, 50.0), strict=True)
    ]
    Path(run.dir).mkdir(parents=True)
    Path(run.dir, "sessions.json").write_text(json.dumps([*sessions, entry, "damaged"]))
    env = {"device_platform": "tpu", "device_kind": "TPU v4"}
    Path(run.dir, "env.json").write_text(json.dumps(env))
    cost = cost_of(run, V4, 2.0, 1000, hours=3)
    assert (cost.session.start_s, cost.session.save_s, cost.session.learned_from) == (90, 40, 3)
    assert cost.session.steps == (3 * 3600 - 600 - 90 - 40) // 2
    assert "(90 s and 40 s each, as in 3 of its sessions)" in cost.lines()[-1]
    elsewhere = cost_of(run, parse_machine("v5p-8"), 2.0, 1000, hours=3)
    assert (elsewhere.session.start_s, elsewhere.session.learned_from) == (ASSUMED_START_S, 0)


def test_sessions_elsewhere_and_without_a_step_do_not_count(tmp_path):
    """Each session names its devices; env.json is only that of the newest."""
    run = run_of(tmp_path, "train.steps=7200", f"dir={tmp_path}/begun")
    entry = {"began": 1.0, "seconds": 900.0, "first_step": 0, "last_step": 9, "save_s": 40.0}
    v4 = entry | {"devices": {"kind": "TPU v4"}, "spent": {"start": 90}}
    gpu = entry | {"devices": {"kind": "NVIDIA H100 80GB HBM3"}, "spent": {"start": 7}}
    killed = v4 | {"last_step": 0, "spent": {"start": 1}}
    Path(run.dir).mkdir(parents=True)
    Path(run.dir, "sessions.json").write_text(json.dumps([v4, killed, killed, gpu, gpu]))
    env = {"device_platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}
    Path(run.dir, "env.json").write_text(json.dumps(env))
    for machine, start_s, count in ((V4, 90, 1), (parse_machine("gpu:h100x8"), 7, 2)):
        session = cost_of(run, machine, 2.0, 1000, hours=3).session
        assert (session.start_s, session.learned_from) == (start_s, count)


def test_a_session_may_hold_the_whole_run_or_nothing(tmp_path):
    run = run_of(tmp_path)
    assert cost_of(run, V4, 1.0, 1, hours=5).session.sessions == 1
    assert "all 1,000 steps" in "\n".join(cost_of(run, V4, 1.0, 1, hours=5).lines())
    short = cost_of(run, V4, 7200.0, 1, hours=1)
    assert short.session.sessions is None and "not one step" in short.lines()[-1]


def test_prices_in_order(tmp_path):
    own = run_of(tmp_path, "plan.prices.v4=1.5")
    assert cost_of(own, V4, 1.0, 1).usd_per_chip_hour == 1.5
    assert cost_of(own, V4, 1.0, 1, price=0.7).usd_per_chip_hour == 0.7
    assert cost_of(own, parse_machine("v5p-8"), 1.0, 1).usd_per_chip_hour == 4.2
    unknown = cost_of(own, parse_machine("gpu:b200x8"), 1.0, 1)
    assert unknown.usd is None and "--price" in unknown.lines()[1]
    spot = cost_of(own, parse_machine("v6e-8"), 1.0, 1).lines()[1]
    assert "; spot " in spot and f"at {CHIPS['v6e'].price.spot:g}" in spot


@pytest.mark.parametrize("name", ["price", "hours"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_what_is_below_zero_is_refused(tmp_path, name, value):
    with pytest.raises(UserError, match=f"--{name}"):
        cost_of(run_of(tmp_path), V4, 1.0, 1, **{name: value})


def test_a_price_for_a_chip_that_is_none(tmp_path):
    with pytest.raises(UserError, match=r"plan.prices.v5f: .*did you mean 'v5"):
        run_of(tmp_path, "plan.prices.v5f=1")
    with pytest.raises(UserError, match=r"plan.prices.v4"):
        run_of(tmp_path, "plan.prices.v4=-1")


@pytest.mark.parametrize(
    "overrides, written, kept",
    [
        ((), 2, 2),  # 500, 1000
        (("checkpoint.save_every_steps=300",), 4, 2),  # 300 600 900, and the last step
        (("checkpoint.save_every_steps=300", "checkpoint.keep_last=1"), 4, 1),
        (("checkpoint.save_every_steps=100", "checkpoint.keep_every_steps=200"), 10, 6),
        # 300, 600, and the last two: 900, which is one of each kind, and 1000
        (("checkpoint.save_every_steps=100", "checkpoint.keep_every_steps=300"), 10, 4),
        (("checkpoint.save_every_steps=5000",), 1, 1),
        (("train.steps=7000000000", "checkpoint.save_every_steps=7"), 10**9, 2),
    ],
)
def test_checkpoints(tmp_path, overrides, written, kept):
    found = cost_of(run_of(tmp_path, *overrides), V4, 1.0, 1)
    assert (found.checkpoints_written, found.checkpoints_kept) == (written, kept)


def test_bytes_of_a_checkpoint(tmp_path):
    params = 3_325_627_392
    run = run_of(tmp_path)
    assert checkpoint_bytes(run) == 12 * params + 16  # weights, two moments, four counts
    assert checkpoint_bytes(run_of(tmp_path, "train.ema_decay=0.9")) == 16 * params + 16
    small = run_of(tmp_path, "optim.kind=adam8bit", "optim.learning_rate=1e-3")
    assert 6 * params < checkpoint_bytes(small) < 6.1 * params


ADAPTERS = 'lora.adapters=[{name = "a", rank = 4}, {name = "b", rank = 6, alpha = 3.0}]'


@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.rank=8",),
        ("lora.rank=8", "lora.base=int4", "train.ema_decay=0.9"),
        ("lora.rank=4", "train.skip_spikes=skip"),
        ("lora.base=int8", ADAPTERS, "optim.kind=adam8bit", "optim.learning_rate=1e-3"),
    ],
)
def test_a_checkpoint_of_adapters_is_without_the_base(tmp_path, overrides):
    run = run_of(tmp_path, *SMALL, *overrides, "train.global_batch_size=8")
    plan = resolve(run, jax.devices()[:1])
    leaves = jax.tree.leaves(saved(abstract_state(plan)))
    assert checkpoint_bytes(run) == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert checkpoint_bytes(run) < 2 * plan.num_params  # the base alone has 4 bytes of each


def test_small_runs_have_small_units(tmp_path):
    run = run_of(tmp_path, *SMALL, "train.steps=500")
    text = "\n".join(cost_of(run, V4, 0.016, 8 * 256).lines())
    assert "about 8 seconds" in text and " MB each" in text
    assert "about 2 minutes" in "\n".join(cost_of(run, V4, 0.24, 8 * 256).lines())


@pytest.mark.parametrize("digits", [9994, 9995, 9996, 9999.7, 1000])
@pytest.mark.parametrize("unit", [1e-1, 1e2, 1e5, 1e8])
def test_figures_have_no_exponents(digits, unit):
    """Numbers that three digits round up to the next unit."""
    value = digits * unit
    for text in (short(value), figure(value), disk(value)):
        assert "e" not in text
        number, _, size = text.replace(",", "").partition(" ")
        scale = {
            "k": 1e3,
            "M": 1e6,
            "B": 1e9,
            "T": 1e12,
            "kB": 1e3,
            "MB": 1e6,
            "GB": 1e9,
            "TB": 1e12,
        }
        size = size or number.lstrip("0123456789.")
        told = float(number.rstrip("kMBT")) * scale.get(size, 1)
        assert told == pytest.approx(value, rel=6e-4)
