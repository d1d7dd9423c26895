"""Every file of a run directory, damaged: the checkpoint before is used or one sentence says what
is wrong; never a traceback, never a state that was not saved."""

import contextlib
import io
import itertools
import json
import random
import shutil
import traceback
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.checkpoint import store
from lmwright.checkpoint.files import LocalRoot
from lmwright.checkpoint.saved import SavedStates
from lmwright.checkpoint.store import Checkpoints
from lmwright.cli.main import main
from lmwright.errors import UserError
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state, saved
from lmwright.train.budget import Budget
from lmwright.train.metrics import MetricsWriter
from lmwright.train.rundir import claim, refuse_lost_checkpoints
from lmwright.train.session import train
from tests.resume.small_runs import STEPS, in_dir, losses
from tests.time_limit import Hangs, time_limit

NEWEST, BEFORE = STEPS, STEPS - 3
ODD = [b"null", b"5", b"[]", b"{}", b'"x"', b"[null]", b"true", b"1e999", b"[" * 200_000,
       b"\xff\xfe", b'{"step": "x"}', b'[{"seconds": []}]', b"\x00" * 64]  # fmt: skip
CHECKPOINT_FILES = ("hashes.json", "_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA",
                    "state/_sharding", "state/manifest.ocdbt")  # fmt: skip


def mutate(rng, path):
    """Changes one file; says how, and what it held."""
    data = before = path.read_bytes()
    kind = rng.choice(["flip", "flip", "cut", "empty", "odd", "odd", "retyped", "gone", "longer"])
    if kind == "retyped":
        data = retyped(rng, data)
    elif kind == "flip" and data:
        data = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 20])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        data = data[: rng.randrange(len(data))] if data else data
    elif kind == "empty":
        data = b""
    elif kind == "odd":
        data = rng.choice(ODD)
    elif kind == "longer":
        data += rng.choice([b"\n", b"{}\n", b"\x00", bytes(rng.randbytes(50)), data])
    path.unlink()
    if kind != "gone":
        path.write_bytes(data)
    return kind, before


def retyped(rng, data):
    """One value of a JSON file, or of one line of it, becomes one of another type."""
    lines = data.split(b"\n")
    which = rng.randrange(len(lines)) if path_lines(lines) else None
    try:
        tree = json.loads(data if which is None else lines[which])
    except ValueError:
        return data
    holder = {"": tree}
    place = (holder, "")
    while rng.random() < 0.85 and isinstance(place[0][place[1]], dict | list):
        inner = place[0][place[1]]
        if not inner:
            break
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        place = (inner, rng.choice(keys))
    place[0][place[1]] = rng.choice([None, -1, 10**30, [], {}, "x", True, float("nan"), [[]], 0.5])
    text = json.dumps(holder[""]).encode()
    if which is None:
        return text
    return b"\n".join([*lines[:which], text, *lines[which + 1 :]])


def path_lines(lines):
    return len(lines) > 2 and all(line.startswith(b"{") for line in lines[:2])


class Truth:
    """What the run saved."""

    def __init__(self, run):
        self.run, self.plan = run, resolve(run, jax.devices()[:1])
        self.abstract = saved(abstract_state(self.plan))
        states = SavedStates(Path(run.dir))
        self.states = {
            step: flat(states.restore_at(step, self.abstract)[0]) for step in (BEFORE, NEWEST)
        }

    def read(self, folder):
        """A reader's state is the one of its step; the step."""
        return self.check(SavedStates(folder, warn=lambda _: None).restore(self.abstract))

    def resume(self, folder):
        """The state to go on from is the one of its step, and another can be saved; the step."""
        with Checkpoints(folder, self.run.checkpoint, warn=lambda _: None) as checkpoints:
            found = checkpoints.restore(self.abstract)
            step = self.check(found)
            checkpoints.save(step + 1, found[0], {"run": ""})
        return step

    def check(self, found):
        state, meta = found
        assert flat(state) == self.states[meta["step"]], "another state than was saved"
        return meta["step"]


def flat(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def truth(trained_run):
    return Truth(trained_run)


def copied(truth, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(truth.run.dir, folder)
    return folder


CONTENTS = (None, b"5", b"null", b"{}")
QUICK = {
    ("hashes.json", b"null"),
    ("hashes.json", b"{}"),
    ("hashes.json", None),
    ("_CHECKPOINT_METADATA", b"5"),
    ("meta/metadata", b"null"),
    ("state/_METADATA", b"{}"),
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(CHECKPOINT_FILES, CONTENTS)
    ],
)
def test_a_damaged_small_file_leads_to_the_checkpoint_before(truth, tmp_path, name, content):
    for which, step in ((NEWEST, BEFORE), (BEFORE, NEWEST)):
        folder = copied(truth, tmp_path / "run")
        path = folder / "checkpoints" / str(which) / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        assert truth.read(folder) == step
        assert truth.resume(folder) == step


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(truth, tmp_path):
    """Every file of it is as its hash says."""
    folder = copied(truth, tmp_path / "run")
    newest = folder / "checkpoints" / str(NEWEST)
    newest.rename(newest.with_name(str(NEWEST + 1)))
    assert truth.read(folder) == BEFORE


def test_a_checkpoint_whose_removal_was_interrupted(truth, tmp_path, monkeypatch):
    """It is removed, as it was going to be, without a word; one that is still kept is told of."""
    told = []
    monkeypatch.setattr(Checkpoints, "_tell", lambda _self, line: told.append(line))
    folder = copied(truth, tmp_path / "run")
    older = folder / "checkpoints" / str(BEFORE - 3)
    shutil.copytree(folder / "checkpoints" / str(BEFORE), older)
    (older / "_CHECKPOINT_METADATA").unlink()
    assert truth.resume(folder) == NEWEST
    assert not older.exists() and not told and not (folder / "checkpoints.damaged").exists()
    folder = copied(truth, tmp_path / "run")
    (folder / "checkpoints" / str(BEFORE) / "_CHECKPOINT_METADATA").unlink()
    assert truth.resume(folder) == NEWEST
    assert told == [
        f"checkpoint {BEFORE} is damaged: _CHECKPOINT_METADATA is missing; moved to "
        "checkpoints.damaged"
    ]


def test_half_a_checkpoint_that_cannot_be_removed_is_told_as_that(truth, tmp_path, monkeypatch):
    def remove(_root, _files):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalRoot, "remove", remove)
    monkeypatch.setattr(store, "MOST_FAILURES", 0)
    folder = copied(truth, tmp_path / "run")
    older = folder / "checkpoints" / str(BEFORE - 3)
    shutil.copytree(folder / "checkpoints" / str(BEFORE), older)
    (older / "_CHECKPOINT_METADATA").unlink()
    told = r"cannot be removed \(Permission denied\); remove it\); run again to continue$"
    with pytest.raises(UserError, match=told):
        truth.resume(folder)


def test_the_verbs_go_on_without_a_damaged_file(truth, tmp_path, capsys):
    run = in_dir(truth.run, copied(truth, tmp_path / "run"))
    newest = Path(run.dir) / "checkpoints" / str(NEWEST)
    (newest / "_CHECKPOINT_METADATA").write_text("5\n")
    assert main(["eval", run.dir]) == 0
    said = capsys.readouterr().err
    why = "_CHECKPOINT_METADATA is not what Orbax wrote"
    assert said == f"checkpoint {NEWEST} is damaged: {why}; using {BEFORE}\n"
    (newest / "hashes.json").write_text("null\n")
    assert train(run, jax.devices()[:1]).step == STEPS
    said = " ".join(capsys.readouterr().out.split())
    assert f"checkpoint {NEWEST} is damaged" in said and f"continuing from step {BEFORE}" in said
    assert losses(run) == losses(truth.run)


def test_checkpoints_of_earlier_versions_without_hashes(truth, tmp_path):
    """Only the newest one may have been left without by a kill; it gets them on resume."""
    folder = copied(truth, tmp_path / "run")
    for step in (BEFORE, NEWEST):
        meta = folder / f"checkpoints/{step}/meta/metadata"
        kept = {k: v for k, v in json.loads(meta.read_text()).items() if k != "version"}
        meta.write_text(json.dumps(kept))
        (folder / f"checkpoints/{step}/hashes.json").unlink()
    assert truth.read(folder) == NEWEST
    with pytest.raises(UserError, match=f"{BEFORE}: is damaged: hashes.json is missing"):
        SavedStates(folder).restore_at(BEFORE, truth.abstract)
    assert truth.resume(folder) == NEWEST
    assert (folder / f"checkpoints/{NEWEST}/hashes.json").exists()


def test_a_good_checkpoint_is_not_blamed_for_a_failing_load(truth, tmp_path, monkeypatch):
    folder = copied(truth, tmp_path / "run")

    def no_memory(*_):
        raise MemoryError("RESOURCE_EXHAUSTED: 7 GiB")

    monkeypatch.setattr(SavedStates, "_load", no_memory)
    with pytest.raises(UserError, match=r"what was saved, but .* loaded \(RESOURCE_EXHAUSTED"):
        Checkpoints(folder).restore(truth.abstract)
    assert (folder / "checkpoints" / str(NEWEST)).is_dir()


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(
    trained_run, tmp_path, capsys, one_device
):
    """A folder that was not mounted or not copied would cost all that was measured."""
    folder = Path(shutil.copytree(trained_run.dir, tmp_path / "run"))
    away, metrics = (folder / "checkpoints").rename(tmp_path / "away"), folder / "metrics.jsonl"
    before = metrics.read_bytes()
    assert main(["train", str(folder)]) == 2
    assert f"had checkpoints and has none; put them back into {folder}" in capsys.readouterr().err
    assert metrics.read_bytes() == before
    away.rename(folder / "checkpoints")
    refuse_lost_checkpoints(trained_run, folder)


@pytest.mark.parametrize(
    "saves, end, aside, refused",
    [
        (2, "killed", False, True),
        (1, "killed", False, False),  # perhaps in its first save
        (1, "done", False, True),
        (2, "done", True, False),  # told to start over
        (0, None, False, False),
    ],
)
def test_only_a_run_that_had_checkpoints_misses_them(
    small_run, tmp_path, saves, end, aside, refused
):
    run, folder = small_run, tmp_path
    with MetricsWriter(folder, run, None) as metrics:
        metrics.log(1, loss=1.0)
        for step in range(saves):
            metrics.event("checkpoint", step=step + 1, blocked_s=0.1)
    if end:
        budget = Budget(run.limits, folder, 0)
        budget.stepped(4)
        if end != "killed":
            budget.close(end)
    if aside:
        (folder / "checkpoints.damaged" / "3").mkdir(parents=True)
    expected = (
        pytest.raises(UserError, match=r"remove .*metrics\.jsonl")
        if refused
        else contextlib.nullcontext()
    )
    with expected:
        refuse_lost_checkpoints(run, folder)


def test_what_killed_writers_left_is_removed(truth, tmp_path):
    folder = copied(truth, tmp_path / "run")
    left = [".run.toml.123.tmp", ".sessions.json.7.tmp", "metrics.jsonl.tmp"]
    for name in left:
        (folder / name).write_text("half")
    (folder / "checkpoints/13.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (folder / "my.notes.tmp").write_text("mine")
    train(in_dir(truth.run, folder), jax.devices()[:1])
    names = {path.name for path in folder.rglob("*")}
    assert not names & {*left, "13.orbax-checkpoint-tmp"} and "my.notes.tmp" in names


def fuzz_checkpoints(truth, folder, rng, count):
    """Reads and resumes with one file of a checkpoint changed; what went wrong."""
    failures = []
    for i in range(count):
        copied(truth, folder)
        which = rng.choice([NEWEST, NEWEST, NEWEST, BEFORE])
        paths = [p for p in (folder / f"checkpoints/{which}").rglob("*") if p.is_file()]
        small = rng.random() < 0.6
        path = rng.choice([p for p in paths if (p.stat().st_size < 5000) == small])
        name = path.relative_to(folder)
        kind, before = mutate(rng, path)
        try:
            with time_limit(60):
                steps = {truth.read(folder), truth.resume(folder)}
            # spaces at the end of JSON are no change
            changed = not path.exists() or path.read_bytes().strip() != before.strip()
            if path.name not in ("_CHECKPOINT_METADATA", "commit_success.txt") and changed:
                assert which not in steps or which == BEFORE, "was taken"
        except (Exception, Hangs) as error:
            failures.append(f"{i}: {kind} of {name}: {error!r}")
    return failures


def fuzz_run_files(truth, folder, rng, count):
    """Report, resume and generation end well or with one sentence; what went wrong."""
    failures = []
    for i in range(count):
        copied(truth, folder)
        path = rng.choice([p for p in folder.rglob("*") if p.is_file() and not is_state(p, folder)])
        name, (kind, _) = path.relative_to(folder), mutate(rng, path)
        said = io.StringIO()
        try:
            with time_limit(60), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                code = main(["report", str(folder), "-o", str(folder / "out.html")])
                assert code in (0, 2), f"exit {code}"
                for attempt in (resume_files, tokenizer_of):
                    with contextlib.suppress(UserError):
                        attempt(truth, folder)
            assert "Traceback" not in said.getvalue(), said.getvalue()
        except (Exception, Hangs) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(f"{i}: {kind} of {name}: {error!r} {where.filename}:{where.lineno}")
    return failures


def is_state(path, folder):
    return path.is_relative_to(folder / "checkpoints") or path.name in (".lock", "report.html")


def resume_files(truth, folder):
    """What a resumed run reads beside its checkpoints."""
    run = in_dir(load_run(folder / "run.toml"), folder)
    plan = replace(truth.plan, run=run)
    with claim(run, plan), MetricsWriter(folder, run, NEWEST):
        Budget.of(run, folder, NEWEST, {}, None)


def tokenizer_of(truth, folder):
    load_model(folder).tokenizer.encode("abc def")


def test_a_few_damaged_inputs(truth, tmp_path):
    rng = random.Random(11)
    assert not fuzz_checkpoints(truth, tmp_path / "a", rng, 5)
    assert not fuzz_run_files(truth, tmp_path / "b", rng, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_damaged_inputs(truth, tmp_path, seed):
    rng = random.Random(seed)
    failures = fuzz_checkpoints(truth, tmp_path / "a", rng, 100)
    failures += fuzz_run_files(truth, tmp_path / "b", rng, 100)
    assert not failures, "\n".join(failures)
