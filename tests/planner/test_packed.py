"""Attention's share in packed rows, against masks of all pairs and rows of a store."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.data.prepare import prepare
from lmwright.nn.intervals import causal
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.packed import BESIDE, BLOCK, SLOWER, packed_share, with_documents
from lmwright.program.length import completed
from tests.planner.runs import SMALL, run_of

H100 = parse_machine("gpu:h100x1")


def visited(segments, window):
    """Blocks of keys from the first to the last that some query of a block sees."""
    mask = np.asarray(causal(segments, window).mask(segments.shape[1]))
    count = 0
    for row in mask:
        for begin in range(0, len(row), BLOCK):
            keys = np.flatnonzero(row[begin : begin + BLOCK].any(axis=0)) // BLOCK
            count += keys[-1] - keys[0] + 1
    return count / len(mask), -(-segments.shape[1] // BLOCK)


@pytest.mark.parametrize("windows", [(None,), (100, None)])
def test_blocks_that_are_visited(windows):
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(1, 7, (3, 1024)), axis=1).astype(np.int32)
    found, whole = [], visited(np.ones_like(ids), None)
    for window in windows:
        blocks, queries = visited(ids, window)
        found.append(blocks + BESIDE * queries)
    wanted = SLOWER * np.mean(found) / (whole[0] + BESIDE * whole[1])
    assert packed_share(ids, windows) == pytest.approx(wanted)


def test_three_documents_take_what_was_measured():
    """Milliseconds on an H100 (docs/internals/gpu-training.md), rows of 2,048 tokens."""
    documents = np.arange(2048)[None] // 683
    for packed, cudnn in ((0.34, 0.57), (0.55, 0.91)):
        assert packed_share(documents, [None]) == pytest.approx(packed / cudnn, rel=0.02)


def test_plan_looks_at_the_rows_that_are_prepared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "model.head_dim=64", "model.seq_len=512", "data.workers=1")
    run = completed(run_of(tmp_path, *words, batch=8))
    assert with_documents(run, H100) == H100  # nothing is prepared
    row = replace(run.data.pack, attention="row")
    wide = Quick.of(run, H100).error_share
    one = replace(run, data=replace(run.data, pack=row))
    assert Quick.of(one, H100).error_share < wide
    (tmp_path / "text").mkdir()
    lines = [json.dumps({"text": "the cat sat on the mat " * (i % 40 + 1)}) for i in range(300)]
    (tmp_path / "text" / "cats.jsonl").write_text("\n".join(lines))
    prepare(run.data, 512)
    known = with_documents(run, H100)
    assert 0 < known.packed_share < 1
    assert with_documents(one, H100) == H100
    for other in ("v5e-8", "cpu:4", "gpu:b200x1"):  # whose kernels compute all scores
        machine = parse_machine(other)
        assert with_documents(run, machine) == machine
    for other in ("gpu:a100x1", "gpu:rtx5090x1"):  # for which tokamax has no kernels
        assert with_documents(run, parse_machine(other)).packed_share == known.packed_share
    plain, packed = Quick.of(run, H100), Quick.of(run, known)
    kinds = plain.timing.by_kind, packed.timing.by_kind
    assert kinds[1]["attention"] == pytest.approx(known.packed_share * kinds[0]["attention"])
    assert {**kinds[0], "attention": 0} == {**kinds[1], "attention": 0}
    assert packed.error_share < wide
    assert main(["plan", str(tmp_path / "run.toml"), "--quick", "--on", "gpu:h100x1", *words]) == 0
    shown = capsys.readouterr().out
    assert f"attention takes {known.packed_share:.2f} of what it does in rows of one" in shown
