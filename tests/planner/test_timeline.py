"""What is alive when, by hand on the small program of test_peak, and its page in a browser."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.peak import GRADIENTS, SAVED, TEMPORARIES, peak_split
from lmwright.planner.compiler.timeline import Timeline
from lmwright.planner.page import Chart, render
from tests.planner.test_peak import KIB
from tests.planner.test_peak import PROGRAM as WITHOUT_CONDITION

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium or chrome")
CONDITION = """
%k (c: (s32[], f32[4,128,128], bf16[4,256,128])) -> pred[] {
  %c = (s32[], f32[4,128,128]{2,1,0:T(8,128)}, bf16[4,256,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %n = s32[] constant(4)
  %ci = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%ci, %n), direction=LT
}

ENTRY"""
PROGRAM = WITHOUT_CONDITION.replace("ENTRY", CONDITION.lstrip("\n"), 1)
STATE = 256 * KIB  # the program's weight


@pytest.fixture(scope="module")
def timeline():
    return Timeline.of(parse(PROGRAM))


def test_arrays_live_from_where_they_are_made_to_where_they_are_read_last(timeline):
    # the entry has 14 instructions, the body of each loop 8
    assert timeline.length == 30
    lives = {life.name: (life.start, life.end, life.use) for life in timeline.lives}
    assert lives["cast"] == (3, 17, TEMPORARIES)  # until %used, behind the forward loop
    assert lives["empty"] == (4, 28, SAVED)  # the stack, until the end of the backward loop
    assert lives["wide"] == (11, 13, TEMPORARIES)
    assert lives["none"] == (17, 30, GRADIENTS)  # until the new weight
    assert [(loop.trips, loop.start, loop.end) for loop in timeline.loops] == [
        (None, 6, 15), (None, 19, 28)]  # fmt: skip


def alive(timeline, at):
    return [life for life in timeline.lives if life.start <= at < life.end]


def test_the_fullest_moment_is_that_of_the_account_of_the_peak(timeline):
    at, most = timeline.fullest
    program = parse(PROGRAM)
    assert most == sum(peak_split(program).values())
    assert {life.name for life in alive(timeline, at)} >= {"empty", "wide", "cast"}
    totals = timeline.totals()
    assert sum(total[at] for total in totals.values()) == most
    assert sum(life.nbytes for life in alive(timeline, at)) == most


class Page(HTMLParser):
    """Elements of a page with their attributes, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self._inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)


def test_the_page_is_whole_and_asks_nobody(timeline):
    evil = "<script>alert(1)</script>"
    text = render(evil, [evil, "FITS"], [], Chart.of(timeline, STATE))
    page = Page(text)
    assert evil not in text and html.escape(evil) in text
    for name in ("src", "href", "srcset", "data"):
        assert not [attrs for _, attrs in page.elements if name in attrs]
    policy = [a["content"] for tag, a in page.elements if a.get("http-equiv")]
    assert policy[0].startswith("default-src 'none'") and "http" not in policy[0]
    lives = [a for tag, a in page.elements if tag == "rect" and "life" in a.get("class", "")]
    data = json.loads(page.scripts[0])
    assert len(lives) == len(data["lives"]) == len(timeline.drawn()) > 5
    areas = [a["points"] for tag, a in page.elements if tag == "polygon"]
    assert len(areas) == 4
    heights = [float(y) for points in areas for y in re.findall(r",([\d.]+)", points)]
    assert min(heights) == 0 and max(heights) == 240  # the fullest moment is the top


def test_a_page_without_a_program_has_no_timeline():
    page = Page(render("r on gpu", ["FITS"], [], None))
    assert not [tag for tag, _ in page.elements if tag == "svg"]


@needs_browser
def test_a_browser_shows_what_is_under_the_pointer(timeline, tmp_path):
    """The page's own script in Chromium: the pointer goes to an instruction, and leaves."""
    at = timeline.fullest[0]
    move = f"""<script>
    const svg = document.getElementById("timeline"), box = svg.getBoundingClientRect();
    const x = box.left + box.width * {(at + 0.5) / timeline.length};
    svg.dispatchEvent(new MouseEvent("mousemove", {{clientX: x, clientY: box.top + 5}}));
    const shown = document.createElement("pre");
    shown.id = "seen";
    shown.textContent = document.getElementById("alive").textContent;
    svg.dispatchEvent(new MouseEvent("mouseleave"));
    shown.dataset.hidden = document.getElementById("alive").hidden;
    document.body.append(shown);
    </script></body>"""
    path = tmp_path / "plan.html"
    path.write_text(render("t", ["FITS"], [], Chart.of(timeline, STATE)).replace("</body>", move))
    flags = "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'home'}"
    done = subprocess.run(
        [BROWSER, *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'<pre id="seen" data-hidden="true">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    seen = html.unescape(found[1]).splitlines()
    whole = (STATE + timeline.fullest[1]) / 2**20
    assert seen[0] == f"instruction {at} of {timeline.length}: {whole:.2f} MiB"
    assert seen[1] == "in a loop" and "0.25 MiB  weights and optimizer" in seen
    assert any(line.startswith("1.00 MiB  temporaries, ") for line in seen)
    assert len(seen) == 3 + len([x for x in alive(timeline, at) if x in timeline.drawn()])
