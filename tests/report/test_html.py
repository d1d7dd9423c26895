"""report.html holds what metrics.jsonl holds, escapes everything, and needs no network."""

import base64
import gzip
import json
import math
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmwright.cli.main import main
from lmwright.errors import UserError
from lmwright.report.curves import clock_of, thin
from lmwright.report.html import report_command, write_report
from lmwright.report.measured import keep_measured
from lmwright.report.read import RunRecord, Series, read_run
from lmwright.report.summary import short, summarize
from tests.report.run_folder import write_run

EVIL = "<script>alert(1)</script></pre><img src=x onerror=alert(2)> \u2028 & \"'"


class Page(HTMLParser):
    """Elements with their attributes, the text of scripts by id, and all text shown."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.shown, self.rows = [], {}, "", []
        self._script = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._script = dict(attrs).get("id", tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._script = None

    def handle_data(self, data):
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
            return
        self.shown += data
        if self.rows and data.strip():
            self.rows[-1].append(data.strip())

    @property
    def runs(self):
        return json.loads(self.scripts["data"])["runs"]

    def row(self, key):
        return next(row[1:] for row in self.rows if row and row[0] == key)


def page_of(*folders, out):
    return Page(write_report(folders, out).read_text(encoding="utf-8"))


def test_embedded_curves_equal_the_metrics_file(tmp_path):
    folder = write_run(tmp_path / "a")
    (run,) = page_of(folder, out=tmp_path / "r.html").runs
    expected = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if line["kind"] in ("train", "eval") and name not in ("step", "time", "kind", "source"):
                key = (line.get("source"), name)
                expected.setdefault(key, []).append((line["step"], value))
    found = {(None, name): curve for name, curve in run["train"].items()}
    for source, curves in run["evals"].items():
        found |= {(source, name): curve for name, curve in curves.items()}
    pairs = {key: list(zip(c["step"], c["value"], strict=True)) for key, c in found.items()}
    assert pairs == expected
    assert run["resumes"] == [30]
    assert run["clock"]["tokens"] == [2048.0 * step for step in run["clock"]["step"]]


def test_curves_of_benchmarks(tmp_path):
    folder = write_run(tmp_path / "a")
    task = {"kind": "task", "source": EVIL, "chat": False, "questions": 9, "errors": {}}
    for step, shots, acc in ((60, 0, 0.5), (30, 0, 0.25), (30, 5, 0.75), (60, 0, 0.625)):
        keep_measured(folder, step, [task | {"shots": shots, "scores": {"acc": acc}}], None)
    (run,) = page_of(folder, out=tmp_path / "r.html").runs
    assert run["tasks"] == {
        f"{EVIL}, 0 shots": {"acc": {"step": [30, 60], "value": [0.25, 0.625]}},
        f"{EVIL}, 5 shots": {"acc": {"step": [30], "value": [0.75]}},
    }


def test_page_loads_nothing_and_forbids_itself_to(tmp_path):
    page = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b"), out=tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    for _, attrs in page.elements:
        assert not {"src", "href", "action", "data", "srcset"} & attrs.keys()
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"url\(|@import|//\w", markup)
    own_code = page.scripts["script"]
    assert not re.search(r"https?:|fetch\(|XMLHttp|import\(|WebSocket|eval\(", own_code)
    metas = [attrs for tag, attrs in page.elements if attrs.get("http-equiv")]
    assert metas[0]["content"].startswith("default-src 'none'")


def test_plotly_is_inside_and_the_page_stays_small(tmp_path):
    from plotly.offline import get_plotlyjs

    page = page_of(write_run(tmp_path / "a"), out=tmp_path / "r.html")
    packed = base64.b64decode(page.scripts["plotly"])
    assert gzip.decompress(packed).decode() == get_plotlyjs()
    assert (tmp_path / "r.html").stat().st_size < 3_000_000


def test_text_of_others_is_escaped_everywhere(tmp_path):
    folder = write_run(tmp_path / "a", sample=EVIL, prompt=EVIL, source=EVIL)
    (folder / "env.json").write_text(json.dumps({"cpu": EVIL, EVIL: EVIL}))
    toml = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(toml.replace('"tiny"', json.dumps(EVIL)))
    with open(folder / "metrics.jsonl", "a") as file:
        event = {"step": 61, "time": 1.79e9, "kind": EVIL, EVIL: EVIL}
        file.write(json.dumps(event) + "\n")
    page = page_of(folder, write_run(tmp_path / "b"), out=tmp_path / "r.html")
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert "img" not in [tag for tag, _ in page.elements]
    assert page.shown.count(EVIL) >= 10
    assert page.runs[0]["name"] == EVIL and EVIL in page.runs[0]["evals"]


def test_two_runs_show_the_keys_in_which_they_differ(tmp_path):
    a = write_run(tmp_path / "a", name="first")
    b = write_run(tmp_path / "b", name="second", learning_rate=1e-3, embed_dim=128)
    text = write_report([a, b], tmp_path / "r.html").read_text()
    section = text[text.index("What differs") : text.index("<h2>Samples")]
    rows = [row for row in Page(section).rows if len(row) == 3]
    assert rows == [["model.embed_dim", "96", "128"], ["optim.learning_rate", "0.0003", "0.001"]]
    page = Page(text)
    assert [run["name"] for run in page.runs] == ["first", "second"]
    assert page.row("train.global_batch_size") == ["4", "4"]


def test_equal_runs_say_so_and_keep_apart_by_folder(tmp_path):
    folders = [write_run(tmp_path / name) for name in "ab"]
    page = page_of(*folders, folders[0], out=tmp_path / "r.html")
    assert "Nothing but name and folder" in page.shown
    assert [run["name"] for run in page.runs] == [f"tiny ({folder})" for folder in folders]


def test_summary_figures(tmp_path):
    folder = write_run(tmp_path / "a")
    page = page_of(folder, out=tmp_path / "r.html")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wiki = [line for line in lines if line.get("source") == "wiki"]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert page.row("perplexity, wiki") == [f"{wiki[-1]['ppl']:.2f}"]
    assert page.row("bits per byte, wiki") == [f"{wiki[-1]['bits_per_byte']:.4f}"]
    assert page.row("training loss (mean of the last 5 %)") == [f"{sum(losses[-3:]) / 3:.4f}"]
    assert page.row("parameters") == ["1,234,567"]
    assert page.row("tokens seen") == [f"{2048 * 60:,}"]
    assert page.row("machine") == ["16 x TPU v4"]
    assert page.row("resumed") == ["at step 30"]
    assert page.row("time running") == [f"{59 * 2 / 60:.1f} min"]


def test_the_best_loss_is_told_where_it_is_not_the_last(tmp_path):
    record = read_run(write_run(tmp_path / "a"))
    record.evals["wiki"]["loss"] = Series([20, 40, 60], [2.5, 2.25, 2.75])
    record.evals["code"]["loss"] = Series([20, 40, 60], [3.5, 2.25, 2.0])
    rows = summarize(record)
    assert rows["held-out loss, wiki"] == "2.7500 (best 2.2500 at step 40)"
    assert rows["held-out loss, code"] == "2.0000"
    record.evals["wiki"]["loss"] = Series([20, 40, 60], [2.5, 2.25, math.nan])
    record.evals["code"]["loss"] = Series([20, 40, 60], [math.nan, math.nan, 2.0])
    rows = summarize(record)
    assert rows["held-out loss, wiki"] == "nan (best 2.2500 at step 40)"
    assert rows["held-out loss, code"] == "2.0000"


@pytest.mark.parametrize(
    "number, text",
    [(950, "950"), (999.4, "999"), (999.6, "1k"), (12_345, "12.3k"), (999_400, "999k"),
     (999_600, "1M"), (1.2e9, "1.2B"), (9.996e11, "1T")],
)  # fmt: skip
def test_large_numbers_have_three_digits(number, text):
    assert short(number) == text


def test_steps_are_those_of_the_adapter_that_trains_longest(tmp_path):
    steps = {"train.steps": 40, "lora.adapters.0.steps": 30, "lora.adapters.1.steps": 80}
    folder = write_run(tmp_path / "a")
    record = replace(read_run(folder), config=steps)
    assert summarize(record)["steps"] == "60 of 80"


def test_secrets_in_the_configuration_are_not_shown(tmp_path):
    write_report([write_run(tmp_path / "a")], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "https://***@example.org/books.txt?***" in text
    assert "me:pw" not in text and "sig=abc" not in text


def test_where_it_goes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert report_command([a]) == a / "report.html"
    assert str(report_command([a, b])) == "report.html"
    assert "report: report.html" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "report.html"]


def test_a_dash_is_the_output(tmp_path, monkeypatch, capsys):
    """A file of that name was made."""
    folder = write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for options, name in ([], "report.html"), (["--markdown"], "report.md"):
        assert main(["report", str(folder), *options]) == 0
        capsys.readouterr()
        assert main(["report", str(folder), *options, "-o", "-"]) == 0
        assert capsys.readouterr().out == (folder / name).read_text()
    assert main(["report", str(folder), "--watch", "-o", "-"]) == 2
    assert not (tmp_path / "-").exists()


def test_a_pipe_and_a_link_keep_their_place(tmp_path):
    """As /dev/stdout does, also for root."""
    folder, pipe, link = write_run(tmp_path / "a"), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with (tmp_path / "read").open("wb") as got, subprocess.Popen(["cat", pipe], stdout=got):
        write_report([folder], pipe)
    page = (tmp_path / "read").read_bytes()
    assert pipe.is_fifo() and page.startswith(b"<!doctype html>")
    link.symlink_to(tmp_path / "r.html")
    write_report([folder], link)
    assert link.is_symlink() and (tmp_path / "r.html").stat().st_size == len(page)


def test_nothing_is_left_where_it_cannot_be_written(tmp_path):
    folder = write_run(tmp_path / "a")
    with pytest.raises(UserError, match=r"absent/r\.html: cannot be written"):
        write_report([folder], tmp_path / "absent" / "r.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken: cannot be written"):
        write_report([folder], tmp_path / "taken")
    with pytest.raises(UserError, match="Is a directory"):
        write_report([folder], ".")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "taken"]
    with pytest.raises(UserError, match="no run directory"):
        write_report([], tmp_path / "r.html")


@given(
    st.lists(st.floats(width=32) | st.sampled_from([0.0, math.nan]), min_size=1, max_size=300),
    st.integers(4, 60),
)
def test_thinned_curves_keep_ends_and_extremes(values, limit):
    kept = thin(values, limit)
    assert (kept == sorted(set(kept)) and len(kept) <= limit) or len(values) <= limit
    assert kept[0] == 0 and kept[-1] == len(values) - 1
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        assert max(finite) in [values[i] for i in kept]
    if len(finite) == len(values):
        assert min(finite) in [values[i] for i in kept]
    else:
        assert any(not math.isfinite(values[i]) for i in kept)


def test_a_single_gap_stays_in_a_thinned_curve():
    for place in range(100):
        values = [float(i % 7) for i in range(100)]
        values[place] = math.nan
        assert place in thin(values, 20)


def test_the_clock_begins_with_nothing_seen_and_ends_with_the_last_step(tmp_path):
    """A step 0 has held-out losses, and no tokens; of many steps the last one stays."""
    steps = list(range(0, 15_000, 10))
    record = RunRecord(tmp_path, "a", {}, {}, {}, hours=Series(steps, [s / 100 for s in steps]))
    record.train["tokens_seen"] = Series(steps[1:], [8.0 * step for step in steps[1:]])
    clock = clock_of(record)
    assert len(clock["step"]) <= 1001 and clock["step"][-1] == steps[-1]
    assert clock["tokens"] == [8.0 * step for step in clock["step"]]
    assert clock["hours"] == [step / 100 for step in clock["step"]]


def test_long_run_is_thinned_and_says_so(tmp_path):
    folder = write_run(tmp_path / "a", steps=5000)
    page = page_of(folder, out=tmp_path / "r.html")
    assert "more than 2,000 points are thinned" in " ".join(page.shown.split())
    assert 1500 < len(page.runs[0]["train"]["loss"]["step"]) <= 2000
    assert page.runs[0]["train"]["loss"]["step"][-1] == 5000
