"""What slices have cost: the facts of sessions, and the page that tells them."""

import json
import re

import pytest

from lmwright.config.run import Limits
from lmwright.report.goodput import Goodput, goodput, ledger, parse_sessions
from lmwright.report.html import write_report
from lmwright.report.ledger import LEDGER
from lmwright.report.paid import VARIABLE, paid, parse_facts
from lmwright.train.budget import Budget
from tests.report.run_folder import write_run

HOUR = 3600.0
FIRST = {"job": "gs://b/j 1.000", "chips": 16, "price": 2.0, "active": 1000.0, "queue_s": HOUR,
         "earlier": []}  # fmt: skip
SECOND = FIRST | {
    "active": 30_000.0, "queue_s": HOUR / 2, "chips": 8,
    "earlier": [{"chips": 16, "price": 2.0, "paid_s": 2 * HOUR, "queue_s": HOUR},
                {"chips": 32, "price": 2.0, "paid_s": 0.0, "queue_s": 600.0}],
}  # fmt: skip


def session(facts, began, seconds, first, last, **spent):
    spent = {"start": 0, "compile": 0, "step": 0, "input": 0, "evaluate": 0, "save": 0} | spent
    entry = {"began": began, "seconds": seconds, "first_step": first, "last_step": last}
    return entry | {"spent": spent} | ({"slice": facts} if facts else {})


SESSIONS = [
    session(FIRST, 1600.0, HOUR, 0, 100, start=600, step=3000),
    # 8 chips, asked for after a slice that never came; half an hour until the first session
    session(SECOND, 30_000.0 + HOUR / 2, HOUR, 50, 100, step=HOUR),
]


def test_slices_count_from_the_first_moment_to_the_last():
    measured = goodput(SESSIONS)
    slices = measured.slices
    assert slices.seconds == 2 * HOUR + 1.5 * HOUR and slices.training_s == 2 * HOUR
    assert slices.queue_s == HOUR + 600 + HOUR / 2
    assert slices.chip_hours == 2 * 16 + 1.5 * 8
    assert slices.cost == 2.0 * slices.chip_hours
    assert measured.total_s == slices.seconds
    assert measured.lost_s["redone"] == 1500
    assert measured.lost_s["start"] == 600 + 1.5 * HOUR  # idle slices too
    assert measured.share == pytest.approx((1500 + HOUR) / (3.5 * HOUR))
    assert ledger(measured) == {
        "productive": "1.42 h (40.5%)", "start-up": "1.67 h (47.6%)", "compile": "0.0 s (0.0%)",
        "input": "0.0 s (0.0%)", "eval": "0.0 s (0.0%)", "save": "0.0 s (0.0%)",
        "redone": "0.42 h (11.9%)", "rest": "0.0 s (0.0%)", "queue": "1.67 h without a machine",
        "in all": "3.50 h", "goodput": "40.5%", "chip-hours": "44", "cost": "88.00 USD by the list",
    }  # fmt: skip


def test_losses_below_half_a_percent_are_not_told():
    measured = Goodput(1000.0, 899.0, {"save": 4.0, "compile": 6.0, "start": 91.0, "input": 0.0})
    assert measured.text() == "89.9% (9% starting and restoring, 1% compiling)"


def test_sessions_elsewhere_cost_nothing_known():
    here = session(None, 0.0, 100.0, 0, 10, step=100)
    assert paid([here]) is None and goodput([here]).slices is None
    assert "cost" not in ledger(goodput([here]))
    both = goodput([here, *SESSIONS])
    assert both.total_s == 100 + 3.5 * HOUR and both.slices == goodput(SESSIONS).slices


@pytest.mark.parametrize("facts", [
    7, {}, {"job": "j"}, FIRST | {"chips": "16"}, FIRST | {"price": -1}, FIRST | {"active": 1e300},
    FIRST | {"earlier": [{}]}, FIRST | {"queue_s": True}, FIRST | {"job": 1},
])  # fmt: skip
def test_damaged_facts_are_left_out(facts):
    assert parse_facts(facts) is None
    assert goodput([session(facts, 0.0, 10.0, 0, 1, step=10)]).slices is None


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps(FIRST)])
def test_a_session_writes_down_its_slice(tmp_path, monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    Budget(Limits(), tmp_path, 0).close("done")
    [entry] = parse_sessions((tmp_path / LEDGER).read_bytes())
    assert entry.get("slice") == (FIRST if text.startswith('{"') else None)


def test_the_page_tells_where_time_and_money_went(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "a" / LEDGER).write_text(json.dumps(SESSIONS))
    write_run(tmp_path / "b", name="other")
    rows = rows_of(write_report([tmp_path / "a"], tmp_path / "a.html"))
    assert rows["productive"] == ["1.42 h (40.5%)"] and rows["chip-hours"] == ["44"]
    assert rows["cost"] == ["88.00 USD by the list"]
    rows = rows_of(write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "ab.html"))
    assert rows["queue"][0] == "1.67 h without a machine" and len(rows["queue"]) == 2
    assert (
        "Where the time went" not in write_report([tmp_path / "b"], tmp_path / "b.html").read_text()
    )


def rows_of(page):
    """Rows of the table of times, as text."""
    part = page.read_text().partition("Where the time went")[2].partition("</table>")[0]
    found = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', part, re.S)
    return {name: re.findall(r"<td>(.*?)</td>", cells, re.S) for name, cells in found}
