"""Plots of long contexts: what is drawn where, and files that are damaged."""

import json
import math
import threading
import time
import xml.etree.ElementTree as ET

import pytest

from lmwright.errors import UserError
from lmwright.report import measured
from lmwright.report.html import write_report
from lmwright.report.measured import keep_measured, read_measured
from tests.report.run_folder import write_run

EVIL = "</svg><script>alert(1)</script>\"'"
POSITIONS = {
    "kind": "positions", "source": "books", "starts": [1, 2, 4, 8], "stops": [2, 4, 8, 16],
    "losses": [8.0, 6.0, 5.0, 4.0], "tokens": [10, 20, 40, 80],
}  # fmt: skip
NEEDLE = {
    "kind": "needle", "source": "books", "lengths": [1024, 4096], "depths": [0, 50, 100],
    "found": [[4, 4, 4], [4, 0, 1]], "tries": 4, "seed": 0,
}  # fmt: skip


def drawings(path):
    """The SVG elements of a page."""
    text = path.read_text(encoding="utf-8")
    return [
        ET.fromstring("<svg" + piece.split("</svg>")[0] + "</svg>")
        for piece in text.split("<svg")[1:]
    ]


def test_curves_and_cells(tmp_path):
    folder = write_run(tmp_path / "a")
    keep_measured(folder, 30, [POSITIONS], None)
    keep_measured(folder, 60, [POSITIONS | {"losses": [8.0, 5.0, 3.0, 1.0]}, NEEDLE], None)
    curves, grid = drawings(write_report([folder], tmp_path / "r.html"))
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in curves.iter("polyline")
    ]
    assert [len(points) for points in lines] == [4, 4]
    for points in lines:  # to the right, and downwards as the loss falls
        assert [*points] == sorted(points) and [y for _, y in points] == sorted(
            y for _, y in points
        )
    (first, second) = lines
    assert first[0] == second[0] and second[-1][1] > first[-1][1]
    # loss 4 is as far below 6 as 6 is below 8
    assert first[3][1] - first[1][1] == pytest.approx(first[1][1] - first[0][1], abs=0.11)
    titles = [title.text for title in curves.iter("title")]
    assert titles[1] == "books, step 30: 2 to 3 tokens before: 6.0000 (20 tokens)"
    shares = [
        float(cell.get("fill-opacity")) for cell in grid.iter("rect") if "hit" in cell.get("class")
    ]
    assert shares == [1, 1, 1, 1, 0, 0.25]
    assert [t.text for t in grid.iter("title")][-2:] == [
        "4,096 tokens, depth 50%: 0 of 4 found", "4,096 tokens, depth 100%: 1 of 4 found",
    ]  # fmt: skip
    for at in (*curves.iter("circle"), *grid.iter("rect")):
        assert 0 <= float(at.get("cx") or at.get("x")) <= 640


def test_runs_side_by_side_and_texts_of_others(tmp_path):
    for name in "ab":
        folder = write_run(tmp_path / name)
        keep_measured(folder, 60, [POSITIONS | {"source": EVIL}, NEEDLE | {"source": EVIL}], "one")
    path = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "r.html")
    assert len(drawings(path)) == 3 and path.read_text().count("<script") == 3
    assert "one, &lt;/svg&gt;" in path.read_text()


def test_a_run_without_them_has_no_such_part(tmp_path):
    folder = write_run(tmp_path / "a")
    page = write_report([folder], tmp_path / "r.html").read_text()
    assert "<svg" not in page and "Long contexts" not in page


def test_newer_lines_replace_older_ones(tmp_path):
    keep_measured(tmp_path, 1, [POSITIONS, NEEDLE], None)
    keep_measured(tmp_path, 1, [NEEDLE | {"seed": 9}], None)
    keep_measured(tmp_path, 1, [NEEDLE], "other")
    keep_measured(tmp_path, 2, [NEEDLE], None)
    lines = read_measured(tmp_path)
    assert [(line["kind"], line["step"], line.get("seed")) for line in lines] == [
        ("positions", 1, None), ("needle", 1, 9), ("needle", 1, 0), ("needle", 2, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "pin"}, {"source": 3}, {"losses": [1.0]}, {"losses": [1.0, 2.0, math.nan, 3.0]},
        {"starts": [0, 1, 2, 3]}, {"tokens": None}, {"step": "1"}, {"losses": ["a"] * 4},
    ],
)  # fmt: skip
def test_damaged_lines_are_named(change, tmp_path):
    line = json.dumps({"step": 1, "time": 0.0} | POSITIONS | change)
    (tmp_path / "evals.jsonl").write_text(json.dumps({"step": 1} | NEEDLE) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"evals\.jsonl, line 2: damaged"):
        read_measured(tmp_path)
    (tmp_path / "evals.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="line 1"):
        read_measured(tmp_path)


def test_two_commands_that_measure_at_once_lose_nothing(tmp_path, monkeypatch):
    def slowly(before, new):
        time.sleep(0.1)
        return merged(before, new)

    merged = measured._merged
    monkeypatch.setattr(measured, "_merged", slowly)
    steps = range(3)
    threads = [
        threading.Thread(target=keep_measured, args=(tmp_path, step, [NEEDLE], None))
        for step in steps
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["step"] for line in read_measured(tmp_path)) == list(steps)
