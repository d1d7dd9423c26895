"""Hub: Hugging Face datasets by name, streamed shard by shard (extra `hf`).

The commit that a name stands for is looked up once and pinned, so that a run that goes on
tomorrow reads what it began with.
"""

import functools
from collections.abc import Iterator
from typing import Any

from lmwright.config.run import Source
from lmwright.data.sources.columns import (
    NoColumnError,
    chosen_columns,
    content_columns,
    list_needed_columns,
    select_columns,
)
from lmwright.data.sources.file import File
from lmwright.errors import UserError, first_line, install
from lmwright.storage.hub import bound_waits, sentence


def find_shards(source: Source) -> list[File]:
    """One File per shard of `hf://datasets/owner/name[@revision]`.

    Raises UserError if the package is absent or the hub has no such dataset, subset or split.
    """
    repo, _, revision = source.path.removeprefix("hf://datasets/").partition("@")
    try:
        import datasets  # noqa: F401
        from huggingface_hub import HfApi, errors
    except ImportError:
        raise UserError(
            f"data.sources: {source.path} needs Hugging Face's libraries; {install('hf')}"
        ) from None
    bound_waits()
    try:
        sha = HfApi().dataset_info(repo, revision=revision or None).sha
        dataset = _open(repo, sha, source.subset, source.split)
        shards = dataset.num_shards
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as e:
        why = sentence(e, f"datasets/{repo}", revision, "dataset")
        raise UserError(f"data.sources: {source.path}: {why}") from None
    except Exception as e:  # the libraries raise many kinds
        raise UserError(f"data.sources: {source.path} cannot be opened: {first_line(e)}") from None
    _refuse_missing(dataset, source)
    path = f"hf://datasets/{repo}@{sha}"
    return [
        File(f"{path}#{i}/{shards}", f"{source.split}-{i:05d}", "hub", None, None, sha)
        for i in range(shards)
    ]


def read_shard(file: File, source: Source) -> Iterator[dict[str, Any]]:
    """Records of one shard returned by `find_shards`."""
    index, shards = map(int, file.path.partition("#")[2].split("/"))
    dataset = _dataset_of(file, source)
    _refuse_missing(dataset, source)
    if dataset.column_names is not None:
        columns = select_columns(source, dataset.column_names)
        dataset = dataset.select_columns([n for n in columns if n in dataset.column_names])
    yield from dataset.shard(num_shards=shards, index=index)


def features_of(file: File, source: Source) -> dict[str, Any]:
    """Types of the columns as `datasets` describes them; empty where it does not know them."""
    features = _dataset_of(file, source).features
    return {} if features is None else features.to_dict()


def _dataset_of(file: File, source: Source) -> Any:
    path = file.path.partition("#")[0]
    repo, _, sha = path.removeprefix("hf://datasets/").partition("@")
    return _open(repo, sha, source.subset, source.split)


def _refuse_missing(dataset: Any, source: Source) -> None:
    """Raises NoColumnError for a dataset whose columns are known, and lack one of the source."""
    columns = dataset.column_names
    named = [*content_columns(source), *chosen_columns(source)]
    for name in named if columns is not None else ():
        if name not in columns:
            raise NoColumnError(
                f"{source.path} has no column {name!r}, only {', '.join(columns)}; "
                f"change data.sources.{next(iter(list_needed_columns(source)))}",
                columns,
            )


@functools.lru_cache(4)
def _open(repo: str, sha: str, subset: str | None, split: str) -> Any:
    import datasets

    bound_waits()
    return datasets.load_dataset(repo, name=subset, split=split, revision=sha, streaming=True)
