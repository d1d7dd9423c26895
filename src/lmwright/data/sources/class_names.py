"""Class names: what a data set of Hugging Face calls the numbers in a column of labels.

parquet, Arrow   metadata of the schema, key `huggingface`      --+
hub              features of the dataset                        --+--> ("O", "B-PER", "I-PER")
any local file   dataset_info.json, dataset_infos.json beside it--+
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lmwright.config.run import Source
from lmwright.data.json_text import parse_text
from lmwright.data.sources.file import File, open_binary

INFOS = ("dataset_info.json", "dataset_infos.json")


def class_names(source: Source, file: File, column: str) -> tuple[str, ...]:
    """Names of the numbers 0, 1, ... in a column of a source's file, or in its lists; none where
    no ClassLabel describes it, or several do that differ."""
    for info in _infos(source, file):
        inner = info.values() if isinstance(info, Mapping) else ()
        features = [each.get("features") for each in (info, *inner) if isinstance(each, Mapping)]
        known = {_names(each.get(column)) for each in features if isinstance(each, Mapping)} - {()}
        if known:
            return known.pop() if len(known) == 1 else ()
    return ()


def _infos(source: Source, file: File) -> Iterator[Any]:
    """Descriptions of a data set, or of its subsets by name; the one in the file first."""
    if file.format == "hub":
        from lmwright.data.sources.hub import features_of

        yield {"features": features_of(file, source)}
    if file.format in ("parquet", "arrow") and not file.compression:
        yield _parsed((_schema(file).metadata or {}).get(b"huggingface", b""))
    if "://" not in file.path:
        for folder in dict.fromkeys((Path(file.path).parent, Path(source.path).expanduser())):
            for path in (folder / name for name in INFOS):
                if path.is_file():
                    yield _parsed(path.read_bytes())


def _schema(file: File) -> pa.Schema:
    with open_binary(file.path) as raw:
        if file.format == "parquet":
            return pq.read_schema(raw)
        with pa.ipc.open_stream(raw) as reader:
            return reader.schema


def _parsed(raw: bytes) -> Any:
    try:
        return parse_text(raw.decode())
    except ValueError:
        return None


def _names(feature: Any) -> tuple[str, ...]:
    """Names of a ClassLabel, also of one in lists, as any version of `datasets` writes it."""
    while True:
        if isinstance(feature, list) and len(feature) == 1:
            feature = feature[0]
        elif isinstance(feature, Mapping) and "feature" in feature:
            feature = feature["feature"]
        else:
            break
    names = feature.get("names") if isinstance(feature, Mapping) else None
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not named or feature.get("_type") != "ClassLabel":
        return ()
    clear = not any(name.isdecimal() and name != str(i) for i, name in enumerate(names))
    return tuple(names) if clear else ()  # a number may be the name of another
