"""Benchmarks: a model's answers to tasks of lm-evaluation-harness, and to files of questions.

    arc_easy, mmlu, ...        names of the harness, whose data come from the hub
    questions.jsonl            a question a line, with its choices or the text that follows
    mine.yaml                  a task in the harness's own form

The harness (https://github.com/EleutherAI/lm-evaluation-harness) makes prompts and scores; the
model is ours, so that a run directory, a folder or a GGUF file is measured as it is.
"""

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from jinja2 import TemplateError

from lmwright.core.compute import DTYPES, Compute
from lmwright.core.copies import computing_with
from lmwright.core.ternary import cast_as_trained
from lmwright.errors import UserError, install
from lmwright.evals.answers import BITS, metric_name, questions_of, right_bits
from lmwright.evals.compute import Kernels, refuse_encoder, row_compute, spread
from lmwright.evals.questions_file import read_questions
from lmwright.formats.loaded import LoadedModel

FILES = (".jsonl", ".jsonl.gz")
# what it notes of the machine, by programs that it runs
UNASKED: dict[str, Any] = {
    "get_git_commit_hash": lambda: None,
    "add_env_info": lambda storage: None,
}
ALONE = {"TQDM_DISABLE": "1", "DISABLE_MULTIPROC": "1", "TOKENIZERS_PARALLELISM": "false"}
FAULTS = (
    OSError, ValueError, LookupError, TypeError, AssertionError, ImportError, TemplateError,
)  # fmt: skip
BOOTSTRAPS = 1000  # for figures whose standard error has no closed form


@dataclass(frozen=True)
class Score:
    """One figure of a task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    shots: int
    questions: int


@dataclass(frozen=True)
class TaskScores:
    """A model's figures in some tasks."""

    scores: tuple[Score, ...]
    details: Mapping[str, Any]
    """Everything that the harness gives: `results`, `configs`, `versions`, `samples`."""
    compute: Compute
    num_devices: int = 1
    """Devices that shared the weights."""
    num_copies: int = 1
    """Devices that had all weights each."""
    notes: tuple[str, ...] = ()
    """What is not as the tasks say."""


def task_scores(
    loaded: LoadedModel,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    data: str | os.PathLike | None = None,
    precision: str | None = None,
    kernels: Kernels = "platform",
    on_progress: Any = None,
) -> TaskScores:
    """Scores of a model in `tasks`: names of the harness, .yaml files in its form, or .jsonl files
    of questions. `shots` examples come before each question (None: as the task says), `limit` is
    the number of questions of each task, and with `chat` prompts are in the model's chat template.
    The data of named tasks are read from the folder `data`, or from the hub. Raises UserError where
    the harness, a task or its data is missing, and for an encoder."""
    refuse_encoder(loaded.model)
    harness = _harness()
    compute = spread(row_compute(precision, kernels), loaded.num_devices)
    with _silent():
        from lmwright.evals.harness_model import HarnessModel
        from lmwright.evals.local_data import LocalData, bad_row, local_data

        wanted, manager = _wanted(tasks)
        local = nullcontext(None) if data is None else local_data(Path(data))
        dtype = DTYPES[compute.precision]
        w = cast_as_trained(loaded.model.spec(), loaded.load(dtype=dtype), dtype)
        model = HarnessModel(loaded, w, compute, on_progress)
        own: LocalData | None = None
        try:
            unasked = patch.multiple(harness, create=True, **UNASKED)
            with computing_with(w), unasked, local as own:
                details = harness.simple_evaluate(
                    model=model, tasks=wanted, num_fewshot=shots, limit=limit,
                    task_manager=manager, apply_chat_template=chat, fewshot_as_multiturn=chat,
                    bootstrap_iters=BOOTSTRAPS, verbosity="ERROR",
                )  # fmt: skip
        except UserError:
            raise
        except Exception as error:  # of the tasks' own code, too
            if own and (problem := bad_row(own)):
                raise UserError(f"--data: {problem}") from error
            if isinstance(error, FAULTS):
                raise _refusal(error, tasks) from error
            raise
        notes = own.notes(details["n-shot"]) if own else ()
    devices = loaded.num_devices, loaded.num_copies
    return TaskScores(tuple(_scores_of(details)), details, compute, *devices, notes)


def _harness() -> Any:
    try:
        with _silent():
            from lm_eval import evaluator
    except ImportError:
        raise UserError(f"--tasks: needs lm-evaluation-harness; {install('eval')}") from None
    return evaluator


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps bars and notes of the harness off the terminal, and it from forking this process."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        quiet = redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO())
        with patch.dict(os.environ, ALONE), quiet[0], quiet[1]:
            yield
    finally:
        logging.disable(level)


def _wanted(tasks: Sequence[str]) -> tuple[list[Any], Any]:
    """The tasks as the harness takes them, and its index of those that are asked for by name."""
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UserError("--tasks: names none; name one, or a file of questions")
    named = [name for name in tasks if not _is_file(name)]
    manager = TaskManager(include_defaults=bool(named), verbosity="ERROR")
    if missing := [name for name in named if not manager.match_tasks([name])]:
        raise UserError(
            f"--tasks: lm-evaluation-harness has no task {missing[0]!r}; `lm-eval ls tasks` lists "
            "all, and a file of questions ends in .jsonl"
        )
    wanted: list[Any] = []
    for name, path in ((name, Path(name)) for name in tasks):
        if not _is_file(name):
            wanted += manager.match_tasks([name])
        elif not path.is_file():
            raise UserError(f"--tasks: {path} is not there")
        else:
            wanted.append(str(path) if name.endswith(".yaml") else read_questions(path))
    return wanted, manager


def _is_file(name: str) -> bool:
    return name.endswith((*FILES, ".yaml"))


def _refusal(error: Exception, tasks: Sequence[str]) -> UserError:
    cause = " ".join(str(error).split())
    if "larger than population" in cause:
        return UserError("--shots: more examples than a task has to take them from; give fewer")
    said = f"--tasks {','.join(tasks)}: {type(error).__name__}: {cause[:300]}"
    if all(map(_is_file, tasks)):
        return UserError(said)
    return UserError(
        f"{said}; data of named tasks come from the hub: without a network, give --data FOLDER "
        "with them (docs/benchmarks.md)"
    )


def _scores_of(details: Mapping[str, Any]) -> Iterator[Score]:
    for task, values in details["results"].items():
        shots, questions = details["n-shot"].get(task) or 0, _num_questions(details, task)
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            error = error if isinstance(error, float) else None
            yield Score(task, metric_name(metric, kind), float(value), error, shots, questions)
        bits = [right_bits(each[0]) for each in _questions(details, task).values()]
        known = np.array([each for each in bits if each is not None])
        if len(known):
            error = float(known.std(ddof=1) / len(known) ** 0.5) if len(known) > 1 else None
            yield Score(task, BITS, float(known.mean()), error, shots, len(known))


def _questions(details: Mapping[str, Any], task: str) -> dict[Any, Any]:
    return questions_of(details.get("samples", {}).get(task, []))


def _num_questions(details: Mapping[str, Any], task: str) -> int:
    """Questions of a task, or of all tasks of a group."""
    if parts := details.get("group_subtasks", {}).get(task):
        return sum(_num_questions(details, part) for part in parts)
    return int(details["n-samples"].get(task, {}).get("effective", 0))
