"""Machine time: sessions that end are left in time, and all of them are counted."""

import json
import random
import time
from dataclasses import replace

import pytest

from lmwright.config.run import Limits
from lmwright.planner.sessions import Pace, course, fits, session_limit_s, steps_that_fit
from lmwright.report.goodput import goodput, parse_sessions
from lmwright.report.ledger import LEDGER
from lmwright.train import budget as budget_module
from lmwright.train.budget import Budget, read_ledger
from lmwright.train.signals import EXIT_SESSION_OVER, EXIT_TIME_SPENT


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def session(folder, limits, clock, first, steps, *, start_s, step_s, save_s, most=10**6):
    """Lives through a session as the loop does; returns the step reached and the exit code."""
    budget = Budget(limits, folder, first, clock=clock, began=clock.now)
    clock.sleep(start_s)
    if code := budget.over():
        budget.close("at once")
        return first, code
    for k in range(first, steps):
        clock.sleep(step_s)
        budget.stepped(k + 1)
        if k + 1 - first == most:
            return k + 1, -9  # killed: nothing is closed
        if k + 1 < steps and (code := budget.over()):
            break
    else:
        code = 0
    clock.sleep(save_s)
    budget.saved(save_s)
    budget.close("closed")
    return k + 1, code


def test_a_session_does_as_many_steps_as_the_plan_says(tmp_path):
    limits, clock = Limits(session_hours=1.0, margin_minutes=5.0), Clock()
    pace = Pace(step_s=7.0, save_s=40.0, start_s=93.0)
    limit = session_limit_s(limits)
    assert limit == 3300
    # a first session knows no save time yet; this one has measured it
    (tmp_path / LEDGER).write_text(json.dumps([{"seconds": 0.0, "save_s": 40.0}]))
    done, code = session(tmp_path, limits, clock, 0, 10_000, start_s=93, step_s=7, save_s=40)
    assert (done, code) == (steps_that_fit(pace, limit), EXIT_SESSION_OVER)
    assert done == (3300 - 93 - 40) // 7
    used = read_ledger(tmp_path / LEDGER)[-1]["seconds"]
    assert limit - 7 < used <= limit


def test_sessions_add_up_to_the_course_of_the_plan(tmp_path):
    limits, clock = Limits(session_hours=0.5, total_hours=2.1, margin_minutes=1.0), Clock()
    (tmp_path / LEDGER).write_text(json.dumps([{"seconds": 0.0, "save_s": 11.0}]))
    step, codes = 0, []
    while not codes or codes[-1] == EXIT_SESSION_OVER:
        step, code = session(tmp_path, limits, clock, step, 9999, start_s=60, step_s=13, save_s=11)
        codes.append(code)
        clock.sleep(5000)  # between sessions
    pace = Pace(step_s=13.0, save_s=11.0, start_s=60.0)
    whole = course(pace, 9999, session_limit_s(limits), 2.1 * 3600 - 60)
    assert codes[-1] == EXIT_TIME_SPENT and len(codes) == whole.sessions
    assert step == whole.steps
    ledger = read_ledger(tmp_path / LEDGER)[1:]
    assert [e["first_step"] for e in ledger[1:]] == [e["last_step"] for e in ledger[:-1]]
    assert sum(e["seconds"] for e in ledger) == pytest.approx(whole.seconds)
    assert course(pace, 40, float("inf")) == course(pace, 40, 10**9)
    # at once, and again, until the total is raised
    limits = replace(limits, session_hours=None)
    again = session(tmp_path, limits, clock, step, 9999, start_s=60, step_s=13, save_s=11)
    assert again == (step, EXIT_TIME_SPENT)


def test_time_is_kept_for_the_longest_step_and_the_latest_save(tmp_path):
    """Steps of 10, 90 and 10 seconds, and saves that took 20 seconds and then 300: of an hour
    another step begins while 390 seconds are left."""
    entries = [{"seconds": 0.0, "save_s": save_s} for save_s in (20.0, 300.0)]
    (tmp_path / LEDGER).write_text(json.dumps(entries))
    limits, clock = Limits(session_hours=1.0, margin_minutes=0.0), Clock()
    budget = Budget(limits, tmp_path, 0, clock=clock, began=clock.now)
    for step, seconds in enumerate((10, 90, 10)):
        clock.sleep(seconds)
        budget.stepped(step + 1)
    clock.sleep(3600 - 390 - 110)
    assert budget.over() is None
    clock.sleep(1)
    assert budget.over() == EXIT_SESSION_OVER


def test_a_killed_session_counts(tmp_path):
    limits, clock = Limits(total_hours=1.0), Clock()
    session(tmp_path, limits, clock, 0, 99, start_s=10, step_s=20, save_s=1, most=5)
    (entry,) = read_ledger(tmp_path / LEDGER)
    assert entry["end"] == "killed" and entry["last_step"] == 5
    assert 80 <= entry["seconds"] <= 110
    assert Budget(limits, tmp_path, 4, clock=clock).total_s == entry["seconds"]


def test_a_session_that_is_killed_while_it_compiles_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(budget_module, "WRITE_EVERY_S", 0.01)
    limits, clock = Limits(total_hours=1.0), Clock()
    budget = Budget(limits, tmp_path, 0, clock=clock, began=clock.now - 10)

    def counted():
        return sum(entry["seconds"] for entry in read_ledger(tmp_path / LEDGER))

    with budget.apart("compile"):
        for seconds in (10, 510):
            deadline = time.monotonic() + 20
            while counted() < seconds and time.monotonic() < deadline:
                time.sleep(0.01)
            assert counted() == seconds
            clock.sleep(500)


def test_what_is_beside_a_step_is_not_its_time(tmp_path):
    clock = Clock()
    budget = Budget(Limits(session_hours=1.0, margin_minutes=0.0), tmp_path, 0, clock=clock)
    for k in range(3):
        clock.sleep(2)
        with budget.apart("evaluate"):
            clock.sleep(100)
        budget.stepped(k + 1)
    assert budget.step_s == 2
    clock.sleep(3600 - 306 - 10)
    assert budget.over() is None and budget.over(beside_s=9) == EXIT_SESSION_OVER


def test_goodput_counts_each_step_once(tmp_path):
    clock, limits = Clock(), Limits()

    def sit(start, steps, end):
        budget = Budget(limits, tmp_path, start, clock=clock, began=clock() - 10)
        with budget.apart("compile"):
            clock.sleep(20)
        for k in range(steps):
            clock.sleep(5)
            budget.stepped(start + k + 1, waited_s=1)
        with budget.apart("save"):
            clock.sleep(3)
        clock.sleep(2)
        budget.close(end)

    sit(0, 10, "preempted")
    sit(6, 5, "done")  # steps 7 to 10 again
    measured = goodput(parse_sessions((tmp_path / LEDGER).read_bytes()))
    assert measured.total_s == 85 + 60
    assert measured.productive_s == pytest.approx(4 * (6 + 5))
    assert measured.lost_s == pytest.approx(
        {"start": 20, "compile": 40, "input": 15, "evaluate": 0, "save": 6, "redone": 16,
         "other": 4}
    )  # fmt: skip
    assert measured.text().startswith("30.3% (28% compiling, 14% starting and restoring")
    sit(4, 3, "done")  # the saves at 6 and at 11 were damaged: 5 and 6 again, too
    measured = goodput(parse_sessions((tmp_path / LEDGER).read_bytes()))
    assert measured.productive_s == pytest.approx(4 * (4 + 0 + 3))
    assert goodput(parse_sessions(b"[1, {}]")) is None
    damaged = (
        b'[{"began": 1, "seconds": 9, "first_step": 0, "last_step": 3, "spent": {"step": null}}]'
    )
    assert parse_sessions(damaged) and goodput(parse_sessions(damaged)) is None
    assert goodput([{"began": 1, "seconds": 9, "first_step": 0, "last_step": 3}]) is None


def test_saves_are_reckoned_until_one_is_measured(tmp_path):
    clock = Clock()
    limits = Limits(session_hours=1.0, margin_minutes=0.0)
    budget = Budget(limits, tmp_path, 0, clock=clock, checkpoint_bytes=10**12)
    clock.sleep(3600 - 1999)
    assert budget.over() == EXIT_SESSION_OVER
    budget.saved(5.0)
    assert budget.over() is None
    assert fits(1, 2, 3, 6) and not fits(1, 2, 3.1, 6)


WHOLE = [
    {"began": 1.7e9, "seconds": 1800.0, "first_step": 0, "last_step": 90, "step_s": 19.5,
     "save_s": 2.0, "end": "session limit"},
    {"began": 1.7e9, "seconds": 600.0, "first_step": 90, "last_step": 120, "end": "killed"},
]  # fmt: skip


@pytest.mark.parametrize(
    "harm, seconds",
    [
        ({"seconds": -7062.0}, 90 * 19.5 + 600),  # a clock that was set back, by an earlier version
        ({"seconds": "x", "step_s": None}, 600),
        ({"seconds": True, "last_step": [3]}, 600),
        ({"save_s": "fast", "step_s": {}}, 2400),
        ({"seconds": float("nan")}, 90 * 19.5 + 600),
        ({"seconds": 10**400}, 90 * 19.5 + 600),
    ],
)
def test_a_damaged_ledger_is_repaired_and_said(tmp_path, harm, seconds, capsys):
    path, clock = tmp_path / LEDGER, Clock()
    path.write_text(json.dumps([WHOLE[0] | harm, WHOLE[1]]))
    budget = Budget(Limits(total_hours=2.0), tmp_path, 120, clock=clock)
    assert budget.total_s == pytest.approx(seconds) and budget.over() is None
    assert "is damaged; 2 sessions" in capsys.readouterr().out
    assert json.loads((tmp_path / f"{LEDGER}.damaged").read_text())[1] == WHOLE[1]
    clock.sleep(30)
    budget.close("done")
    assert sum(entry["seconds"] for entry in read_ledger(path)) == pytest.approx(seconds + 30)
    assert not capsys.readouterr().out, "it is whole again"


def test_no_ledger_locks_a_run_out(tmp_path):
    rng, whole = random.Random(3), json.dumps(WHOLE).encode()
    texts = [b"", b"3", b"null", b"{}", b"[[]]", b"[" * 10**5, b"\xff", b'{"seconds": 1}']
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        texts.append(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
    limits = Limits(session_hours=1.0, total_hours=100.0)
    for text in texts:
        (tmp_path / LEDGER).write_bytes(text)
        budget = Budget(limits, tmp_path, 0, clock=Clock())
        assert 0 <= budget.total_s < 1e15
        budget.close("done")
        assert json.loads((tmp_path / LEDGER).read_bytes())[-1]["end"] == "done"


def test_seconds_only_grow(tmp_path):
    clock = Clock()
    budget = Budget(Limits(), tmp_path, 0, clock=clock)
    clock.sleep(50)
    budget.close("stopped")
    clock.sleep(-40)
    budget.close("done")
    assert read_ledger(tmp_path / LEDGER)[0]["seconds"] == 50
