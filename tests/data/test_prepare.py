"""Prepare end to end: same bytes for any number of workers and after kills, in bounded memory."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lmwright.config.run import Data, Normalize, Pack, Source, Tokenizer
from lmwright.data.prepare import STAGES, prepare, print_summary
from lmwright.data.summary import Summary
from lmwright.errors import UserError

WORDS = "the of and to in is that for it as was with be by on not he his but at are this".split()


def corpus(folder, docs=400):
    """Three sources with equal documents here and there; returns them."""
    rng = random.Random(5)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(5, 400))) for _ in range(docs)]
    texts += texts[: docs // 10]
    rng.shuffle(texts)
    third = len(texts) // 3
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:third]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as f:
        f.writelines(json.dumps({"text": t}) + "\n" for t in texts[third : 2 * third])
    (folder / "c").mkdir()
    for i, text in enumerate(texts[2 * third :]):
        (folder / f"c/{i:04d}.txt").write_text(text)
    return tuple(Source(path=str(folder / p)) for p in ("a.jsonl", "b.jsonl.gz", "c"))


def make(data_dir, sources, workers):
    """All stages in small parts; what a killed process is in the middle of."""
    from lmwright.data.text.normalize import normalize
    from lmwright.data.tokens.tokenize import tokenize
    from lmwright.data.tokens.tokenizer_stage import make_tokenizer

    data = Data(
        dir=str(data_dir),
        sources=sources,
        holdout_fraction=0.1,
        normalize=Normalize(dedup="exact"),
        tokenizer=Tokenizer(vocab_size=300),
    )
    normalize(data, workers=workers, part_bytes=8000)
    make_tokenizer(data_dir, data.tokenizer)
    tokenize(data_dir, data.tokenize, workers=workers, part_bytes=8000)
    return prepare(data, 64, stages=("pack", "shuffle"), workers=workers)


def digest(folder):
    """Every file's bytes, locks left out."""
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


SCRIPT = """
import sys
sys.path[:0] = sys.argv[4:]
import test_prepare
from lmwright.config.run import Source
if __name__ == "__main__":
    assert "jax" not in sys.modules
    sources = tuple(Source(path=p) for p in sys.argv[2].split(","))
    test_prepare.make(sys.argv[1], sources, int(sys.argv[3]))
    assert "jax" not in sys.modules
    print("done")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Sources, and the digest of what one process makes of them at once."""
    folder = tmp_path_factory.mktemp("whole")
    sources = corpus(folder)
    make(folder / "data", sources, workers=1)
    return sources, digest(folder / "data")


@pytest.mark.slow
def test_killed_twice_the_bytes_are_the_same(tmp_path, whole):
    """SIGKILL amid the first pass and amid tokenize, two workers; to the end with one."""
    sources, expected = whole
    assert len([n for n in expected if n.startswith("tokenize/parts/")]) > 20
    script = tmp_path / "make.py"
    script.write_text(SCRIPT)
    paths = ",".join(s.path for s in sources)
    here = [str(Path(__file__).parent), *filter(None, sys.path)]
    command = [sys.executable, str(script), str(tmp_path / "data"), paths]
    kept = {}
    for stage, unfinished in (("read", "normalize"), ("tokenize", "tokenize"), (None, None)):
        process = subprocess.Popen(
            [*command, "2" if stage else "1", *here],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if stage is None:
            assert process.communicate()[0] == "done\n" and process.returncode == 0
            break
        parts = tmp_path / "data" / stage / "parts"
        while len(list(parts.glob("*.json"))) < 3 and process.poll() is None:
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "data" / unfinished / "manifest.json").exists()
        kept = {p: p.stat().st_mtime_ns for p in parts.glob("*.json")}
        assert len(kept) >= 3
    assert digest(tmp_path / "data") == expected
    # parts that were finished before the kill were not made again
    assert {p: p.stat().st_mtime_ns for p in kept} == kept


def test_stages_alone_and_together(tmp_path):
    sources = corpus(tmp_path, docs=60)
    data = Data(dir=str(tmp_path / "x"), sources=sources, tokenizer=Tokenizer(vocab_size=280))
    with pytest.raises(UserError, match="normalize: this stage has not been made"):
        prepare(data, 32, stages=("tokenize",), workers=1)
    for stage in STAGES:
        summary = prepare(data, 32, stages=(stage,), workers=1)
        assert list(summary.stages) == [stage]
    step_by_step = digest(tmp_path / "x")
    again = prepare(data, 32, workers=1)
    assert list(again.stages) == list(STAGES) and digest(tmp_path / "x") == step_by_step
    with pytest.raises(UserError, match="no stage 'token'; stages are normalize"):
        prepare(data, 32, stages=("token",))
    # the run's own length goes before the model's
    shorter = Data(dir=data.dir, sources=sources, tokenizer=data.tokenizer, pack=Pack(seq_len=16))
    assert prepare(shorter, 32, workers=1).stages["pack"].facts["seq_len"] == 16


def printed(summary):
    console = Console(width=120, record=True, file=open(os.devnull, "w"))
    print_summary(summary, console)
    return console.export_text()


def test_summary(tmp_path):
    sources = corpus(tmp_path, docs=60)
    (tmp_path / "a.jsonl").open("a").write("broken\n" + json.dumps({"text": " "}) + "\n")
    data = Data(
        dir=str(tmp_path / "x"),
        sources=sources,
        normalize=Normalize(max_bad_fraction=0.1, dedup="exact"),
        tokenizer=Tokenizer(vocab_size=280),
    )
    summary = prepare(data, 32, workers=1)
    text = printed(summary)
    for record in summary.rows():
        assert record["split"] == "train" and 0 < record["efficiency"] <= 1
        line = next(line for line in text.splitlines() if f" {record['source']} " in line)
        assert f"{record['tokens']:,}" in line and f"{record['efficiency']:.1%}" in line
        assert f" {record['bytes'] / record['tokens']:.2f} " in line
    assert "a: 1 bad rows of 24, listed in normalize/quarantine.jsonl" in text
    assert "a: 1 rows without text or label" in text and "duplicates left out" in text
    assert "tokenizer: 280 ids" in text
    packed = summary.stages["pack"]  # of a portion, say
    half = {
        n: c | {"tokens": c["tokens"] // 2} for n, c in packed.counts["sources"]["train"].items()
    }
    packed = replace(packed, counts={"sources": {"train": half}})
    less = printed(Summary(summary.dir, summary.stages | {"pack": packed}))
    assert f" {record['bytes'] / record['tokens']:.2f} " in less
    text = printed(prepare(data, 32, stages=("pack",), workers=1))  # which counts no bytes
    assert f"{record['tokens']:,}" in text and "bytes/token" not in text


MEMORY = """
import json, sys
sys.path[:0] = sys.argv[2:]
from lmwright.data.text.normalize import normalize
from lmwright.data.tokens.tokenize import tokenize
from lmwright.data.tokens.tokenizer_stage import make_tokenizer
from lmwright.config.run import Data, Normalize, Source, Tokenize, Tokenizer

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

folder, peaks = sys.argv[1], []
for size in (24, 72):
    source = Source(path=f"{folder}/{size}.jsonl.gz")
    dedup = Normalize(dedup="exact")
    data = Data(dir=f"{folder}/{size}", sources=(source,), normalize=dedup)
    normalize(data, workers=1)
    make_tokenizer(data.dir, Tokenizer(vocab_size=300, sample_bytes=200_000))
    tokenize(data.dir, Tokenize(), workers=1)
    peaks.append(peak())
print(json.dumps(peaks))
"""


@pytest.mark.slow  # most of a minute
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """48 MB more text in one file that cannot be cut: the peak stays, once all buffers are full."""
    rng = random.Random(1)
    line = " ".join(rng.choices(WORDS, k=2000))
    for size in (24, 72):
        with gzip.open(tmp_path / f"{size}.jsonl.gz", "wt", compresslevel=1) as f:
            for i in range(size * 1_000_000 // len(line)):
                f.write(json.dumps({"text": f"{i} {line}"}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), *filter(None, sys.path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)
    assert large - small < 32, (small, large)
