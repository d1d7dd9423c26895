"""report.md: figures by hand, and a page that a reader of Markdown takes for what it is."""

import json
import re

from markdown_it import MarkdownIt

from lmwright.cli.main import main
from lmwright.report.markdown import write_markdown
from tests.report.run_folder import write_run
from tests.report.test_paid import HOUR, SESSIONS, session


def page(folder, sessions=(), **env):
    if sessions:
        (folder / "sessions.json").write_text(json.dumps(list(sessions)))
    if env:
        old = json.loads((folder / "env.json").read_text())
        (folder / "env.json").write_text(json.dumps(old | env))
    return write_markdown([folder], folder / "report.md").read_text()


def tables(text):
    """Cells of each table, by a parser of Markdown."""
    found, row = [], []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            row = []
        elif token.type == "tr_close":
            found[-1].append(row)
        elif token.type == "inline" and token.level == 4:  # table, body, row, cell
            row.append("".join(child.content for child in token.children))
    return found


def test_hours_cost_and_energy_of_slices(tmp_path):
    folder = write_run(tmp_path / "run")
    text = page(folder, SESSIONS, device_platform="tpu", packages={"jax": "0.11.2"})
    rows = {row[0]: row for table in tables(text) for row in table}
    # of 3.5 hours, 44 chip-hours
    assert rows["together"] == ["together", "3.50 h", "100.0%", "44"]
    share = (1500 + HOUR) / (3.5 * HOUR)
    assert rows["steps that count"][2:] == [f"{share:.1%}", f"{44 * share:.4g}"]
    assert "44 chip-hours cost 88.00 USD by the list price, after 1.67 h in the queue." in text
    # a v4 takes 90 to 192 W
    assert "Between 3.96 and 8.45 kWh: 44 chip-hours of TPU v4 at 90 to 192 W a chip" in text
    assert rows["wiki"][1].startswith("3.33") and rows["wiki"][3].endswith("at 60")
    assert ["16 x TPU v4", "jax 0.11.2"] in [row for table in tables(text) for row in table]
    assert ["1", "1970-01-01 00:26", "1.00 h", "0 to 100"] in [r for t in tables(text) for r in t]
    assert "1 x resume." in text and "Checkpoints saved: 1." in text
    assert "pw" not in text and "abc" not in text and "example.org/books.txt" in text


def test_the_best_loss_is_a_number(tmp_path):
    folder = write_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    first = next(line for line in lines if line["kind"] == "eval" and line["source"] == "wiki")
    first["loss"] = "NaN"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = {row[0]: row for table in tables(page(folder)) for row in table}
    assert rows["wiki"][1].startswith("nan at") and rows["wiki"][2] == rows["wiki"][3]
    assert "nan" not in rows["wiki"][2]


def test_machines_that_are_no_slices(tmp_path):
    own = [session(None, 100.0, 2 * HOUR, 0, 60, step=HOUR)]
    folder = write_run(tmp_path / "cores")  # 8 devices are 4 chips
    text = page(folder, own, device_platform="tpu", device_kind="TPU v3", device_count=8)
    assert "Between 0.984 and 2.1 kWh: 8 chip-hours of TPU v3" in text
    folder = write_run(tmp_path / "secret")
    text = page(folder, own, device_platform="tpu", device_kind="TPU v5 lite", device_count=8)
    assert "Not known: the power of TPU v5 lite is not published." in text
    folder = write_run(tmp_path / "gpu")
    kind = "NVIDIA H100 80GB HBM3"
    text = page(folder, own, device_platform="gpu", device_kind=kind, device_count=1)
    assert "At most 1.4 kWh: 2 chip-hours of NVIDIA H100" in text
    folder = write_run(tmp_path / "laptop")
    text = page(folder, own, device_platform="cpu", device_kind="cpu", device_count=1)
    assert "chip-hours" not in text and "Energy" not in text


def test_a_run_that_moved_counts_the_chips_of_each_machine(tmp_path):
    def on(kind, count, began, first, last):
        entry = session(None, began, 2 * HOUR, first, last, step=HOUR)
        return entry | {"devices": {"kind": kind, "count": count}}

    own = [
        on("TPU v4", 16, 100.0, 0, 60),
        on("cpu", 1, 8000.0, 60, 70),
        on("TPU v3", 8, 16_000.0, 70, 90),  # four chips
    ]
    text = page(write_run(tmp_path / "moved"), own, device_platform="tpu", device_count=8)
    rows = {row[0]: row for table in tables(text) for row in table}
    assert rows["together"] == ["together", "6.00 h", "100.0%", "40"]
    assert "Between 2.88 and 6.14 kWh: 32 chip-hours of TPU v4" in text
    assert "Between 0.984 and 2.1 kWh: 8 chip-hours of TPU v3" in text
    text = page(write_run(tmp_path / "and slices"), [*own, *SESSIONS], device_platform="tpu")
    rows = {row[0]: row for table in tables(text) for row in table}
    assert rows["together"][1:] == ["9.50 h", "100.0%", "84"]


def test_text_of_a_run_is_no_markup(tmp_path):
    evil = "a|b <script>alert(1)</script> `x` [y](javascript:z) **\n# d"
    folder = write_run(tmp_path / "run", name="tiny", source=evil)
    text = page(folder)
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert "<script" not in html and "href" not in html and "<code" not in html
    assert html.count("<h1") == 1 and "<strong" not in html
    flat = " ".join(evil.split())
    assert any(row[0] == flat for table in tables(text) for row in table)


def test_the_command(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder), "--markdown"]) == 0
    text = (folder / "report.md").read_text()
    assert re.match(r"# tiny\n\n## Results\n", text)
    other = write_run(tmp_path / "other", name="other")
    both = tmp_path / "both.md"
    assert main(["report", str(folder), str(other), "--markdown", "-o", str(both)]) == 0
    assert both.read_text().count("\n## Results\n") == 2
    assert main(["report", str(tmp_path / "none"), "--markdown"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_another_file_is_not_replaced(tmp_path, capsys):
    folder, mine = write_run(tmp_path / "run"), tmp_path / "base.toml"
    mine.write_text("mine")
    assert main(["report", str(folder), "--markdown", "-o", str(mine)]) == 2
    assert "exists and is not a page (.html, .md); choose" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--markdown", "-o", str(page)]) == 2
    assert "--markdown writes Markdown; name it .md" in capsys.readouterr().err
    assert not page.exists()
