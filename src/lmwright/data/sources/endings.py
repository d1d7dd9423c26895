"""Endings of the names of files, by what is in them."""

import os
import re

ENDINGS = {
    "txt": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".jsonlines"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet", ".pq"),
    "tfrecord": (".tfrecord", ".tfrecords", ".tfrec"),
    "arrayrecord": (".array_record", ".arrayrecord"),
}
PLAIN = tuple(
    """
    .adoc .bash .bib .c .cc .cfg .clj .cmake .conf .cpp .cs .css .cu .cxx .dart .el .ex .exs
    .f90 .go .h .hh .hpp .hs .html .hxx .ini .java .jl .js .jsx .kt .lean .lisp .log .lua .m
    .markdown .md .ml .mli .nim .org .php .pl .pm .proto .ps1 .py .pyi .pyx .r .rb .rs .rst
    .sass .scala .scss .sh .sql .svelte .swift .tcl .tex .toml .ts .tsx .v .vhdl .vim .vue
    .xml .yaml .yml .zig
    """.split()
)
"""Those of what counts as text in a folder once a source says format = "txt"."""
COMPRESSION = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
PACKED = (".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz")
"""Those of packed files that are not read."""
SHARD = re.compile(r"-\d+-of-\d+$")


def split_ending(path: str) -> tuple[str, str | None]:
    """Lower-case ending of a path without compression, and the compression."""
    name = path.split("?")[0] if "://" in path else path  # without the query of a URL
    stem, ending = os.path.splitext(SHARD.sub("", name.lower()))
    compression = COMPRESSION.get(ending)
    return (os.path.splitext(stem)[1] if compression else ending), compression
