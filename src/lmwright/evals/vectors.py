"""Files of vectors, one for each row of a file of texts, in its order.

    .jsonl      {"row", "id", "embedding": [...]}
    .parquet    row, id, embedding (float32), error
    .npz        ids, and embeddings float32 [rows, D]
    .npy        embeddings alone

Rows without a text are null in parquet, and not a number in arrays. While it grows, a file that is
not jsonl has lines whose vectors are base64.
"""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmwright.errors import UserError
from lmwright.evals.streamed import JSONL, take_name, take_name_of_lines

BLOCK = 4096  # rows that are in memory at a time

Finish = Callable[[int, Path, Path], None]
"""Makes a file of vectors with so many numbers each out of the lines at the first path."""


def line_of(row: Mapping[str, Any], vector: np.ndarray | None, form: str) -> str:
    """The line of a row, with its vector in the way of the format."""
    row = dict(row)
    if vector is not None and form == JSONL:
        row["embedding"] = [float(f"{x:.9g}") for x in vector.tolist()]  # float32, exactly
    elif vector is not None:
        row["base64"] = b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return json.dumps(row, ensure_ascii=False) + "\n"


def finisher(form: str, out: str | None) -> Finish:
    """The function that makes a file of a format. Raises UserError for one that there is not."""
    known: dict[str, Finish] = {
        JSONL: lambda _, part, out: take_name(part, out),
        ".parquet": _whole(_write_parquet),
        ".npz": _whole(_write_npz),
        ".npy": _whole(_write_npy),
    }
    if form not in known:
        raise UserError(f"--out: {out} must end in one of {', '.join(known)}; choose one")
    return known[form]


def _whole(write: Finish) -> Finish:
    """Puts the file in its place when it is complete, and then removes the lines."""

    def finish(dim: int, part: Path, out: Path) -> None:
        fresh = part.with_name(f".{part.name}.{os.getpid()}.tmp")
        try:
            write(dim, part, fresh)
            take_name_of_lines(part, fresh, out)
        finally:
            fresh.unlink(missing_ok=True)

    return finish


def _blocks(part: Path, dim: int) -> Iterator[tuple[list[dict[str, Any]], np.ndarray]]:
    """Lines, some at a time, and their vectors float32 [rows, dim]."""
    with part.open(encoding="utf-8") as file:
        while lines := [json.loads(line) for line in islice(file, BLOCK)]:
            found = np.full((len(lines), dim), np.nan, "<f4")
            for place, line in enumerate(lines):
                if "base64" in line:
                    found[place] = np.frombuffer(b64decode(line["base64"]), "<f4")
            yield lines, found


def _write_parquet(dim: int, part: Path, out: Path) -> None:
    kind = pa.list_(pa.float32(), dim)
    schema = pa.schema(
        [("row", pa.int64()), ("id", pa.string()), ("embedding", kind), ("error", pa.string())]
    )
    with pq.ParquetWriter(out, schema) as writer:
        for lines, found in _blocks(part, dim):
            none = np.array(["error" in line for line in lines])
            columns = [[line.get(name) for line in lines] for name in ("row", "id", "error")]
            vectors = pa.FixedSizeListArray.from_arrays(found.ravel(), dim, mask=pa.array(none))
            writer.write_batch(pa.record_batch([*columns[:2], vectors, columns[2]], schema=schema))


def _write_npy(dim: int, part: Path, out: Path) -> None:
    with out.open("wb") as file:
        _write_array(file, dim, part)


def _write_array(file: Any, dim: int, part: Path) -> list[str]:
    """Writes the vectors as an array of numpy; returns the ids."""
    with part.open("rb") as lines:
        rows = sum(1 for _ in lines)
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
    np.lib.format.write_array_header_2_0(file, header)
    ids = []
    for lines, found in _blocks(part, dim):
        file.write(found.tobytes())
        ids += [line.get("id", "") for line in lines]
    return ids


def _write_npz(dim: int, part: Path, out: Path) -> None:
    with ZipFile(out, "w", allowZip64=True) as archive:
        with archive.open("embeddings.npy", "w", force_zip64=True) as file:
            ids = _write_array(file, dim, part)
        with archive.open("ids.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, np.array(ids, np.str_), allow_pickle=False)
