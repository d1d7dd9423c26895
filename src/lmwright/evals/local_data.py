"""Data of the harness's own tasks from a folder, without the hub.

FOLDER/arc_easy.jsonl            the questions of a task, in the columns of its data on the hub
FOLDER/gsm8k/train.parquet       a split of a task by its name on the hub: the examples
FOLDER/allenai/ai2_arc/          a copy of a dataset of the hub, with its README.md
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
from lm_eval.api.task import ConfigurableTask

from lmwright.errors import UserError

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
READERS |= {f"{ending}.gz": READERS[ending] for ending in (".jsonl", ".json", ".csv")}
SPLITS = ("training_split", "validation_split", "test_split")


@dataclass
class LocalData:
    """Tasks that read a folder, and where."""

    folder: Path
    tasks: dict[str, ConfigurableTask] = field(default_factory=dict)
    places: dict[str, Path] = field(default_factory=dict)
    """The file or folder of each task's questions."""
    without_examples: set[str] = field(default_factory=set)
    """Tasks whose examples are not there: others of their questions are taken."""

    def notes(self, shots: Mapping[str, int]) -> tuple[str, ...]:
        """Lines about what is not as the tasks say; `shots` is the number of examples of each."""
        return tuple(
            f"{name}: its examples are other questions, since {self.folder} has no examples of it"
            for name in sorted(self.without_examples)
            if shots.get(name)
        )


@contextmanager
def local_data(folder: Path) -> Iterator[LocalData]:
    """Lets the harness's tasks read `folder` in place of the hub. Raises UserError for a task whose
    data are not there or cannot be read."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"--data: {folder} is not a folder; give one with the data of the tasks")
    found = LocalData(folder)
    download = ConfigurableTask.download

    def own(task: ConfigurableTask, dataset_kwargs: Any = None, **more: Any) -> None:
        if not _read(task, found):
            download(task, dataset_kwargs, **more)

    with patch.object(ConfigurableTask, "download", own):
        yield found


def bad_row(data: LocalData) -> str | None:
    """The first question that its task cannot ask, with the reason; None if there is none."""
    for name, task in data.tasks.items():
        rows = task.dataset[_scored(task)]
        for number in range(len(rows)):
            if problem := _problem(task, rows.select([number])):
                empty = [column for column, value in rows[number].items() if value is None]
                problem = f"{', '.join(empty)}: empty or not there" if empty else problem
                there = ", ".join(rows.column_names)
                return f"{data.places[name]}: row {number + 1}: {problem} (columns: {there})"
    return None


def _problem(task: ConfigurableTask, row: Any) -> str | None:
    try:
        docs = task.config.process_docs(row) if task.config.process_docs else row
        task.prompt, task.features = None, [*docs.features]  # of a task that was not finished
        for doc in docs:
            task.doc_to_text(doc)
            task.doc_to_target(doc)
            if task.config.doc_to_choice is not None:
                task.doc_to_choice(doc)
    except KeyError as error:
        return f"{error} is not there"
    except Exception as error:  # whatever the task's own code says
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _read(task: ConfigurableTask, data: LocalData) -> bool:
    """Gives a task its data; False for one that brings its own."""
    config = task.config
    if callable(config.custom_dataset) or _is_local(str(config.dataset_path)):
        return False
    name, scored = str(config.task), _scored(task)
    of_name = _splits(data.folder).get(name)
    splits = _splits(data.folder / name)
    copied = data.folder / str(config.dataset_path)
    if of_name or scored in splits:
        files = splits | ({scored: of_name} if of_name else {})
        place = files[scored]
        task.dataset = _loaded(place, lambda cache: _of_files(files, cache))
    elif copied.is_dir():
        place = copied
        task.dataset = _loaded(
            place,
            lambda cache: datasets.load_dataset(
                str(copied), config.dataset_name, keep_in_memory=True, cache_dir=cache
            ),
        )
    else:
        raise UserError(
            f"--data: {data.folder} has no data of {name}; put its questions into {name}.jsonl, "
            f"its splits into {name}/{scored}.jsonl, or a copy of the dataset into "
            f"{config.dataset_path}"
        )
    if scored not in task.dataset:
        raise UserError(f"{place}: has no split {scored!r}, which {name} needs")
    _leave_out_missing(task, scored, data)
    data.tasks[name], data.places[name] = task, place
    return True


def _leave_out_missing(task: ConfigurableTask, scored: str, data: LocalData) -> None:
    """Takes splits that are not there from the task's description. Without any examples, those are
    questions other than the asked one, as the harness has it for tasks of one split."""
    config = task.config
    examples = config.fewshot_config
    for split in SPLITS:
        if getattr(config, split) not in task.dataset:
            setattr(config, split, None)
    if examples.split not in task.dataset:
        examples.split = None
    others = {examples.split, config.training_split, config.validation_split}
    if examples.samples is None and others <= {None, scored}:
        config.test_split = examples.split = scored  # equal: the asked one is left out
        data.without_examples.add(str(config.task))


def _scored(task: ConfigurableTask) -> str:
    return str(task.config.test_split or task.config.validation_split or "test")


def _is_local(dataset_path: str) -> bool:
    return dataset_path in (*READERS.values(), "text", "arrow") or Path(dataset_path).exists()


def _splits(folder: Path) -> dict[str, Path]:
    """Files of a folder by the names of their splits."""
    names = (path.name.partition(".") for path in folder.iterdir()) if folder.is_dir() else ()
    return {
        name: folder / f"{name}.{ending}"
        for name, _, ending in sorted(names)
        if f".{ending}" in READERS
    }


def _of_files(files: dict[str, Path], cache: str) -> dict[str, Any]:
    return {
        split: datasets.load_dataset(
            READERS[path.name[path.name.index(".") :]], data_files=str(path), split="train",
            keep_in_memory=True, cache_dir=cache,
        )
        for split, path in files.items()
    }  # fmt: skip


def _loaded(place: Path, load: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as cache:
        try:
            return load(cache)
        except Exception as error:  # of many kinds, by its readers
            cause = " ".join(str(error.__cause__ or error).split())
            raise UserError(f"{place}: cannot be read ({cause[:300]})") from None
