"""Tokenizer stage: the run's tokenizer, imported or trained, in `<data.dir>/tokenizer`.

The folder is in Hugging Face's layout, beside the stage's own manifest.
"""

import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from lmwright.config.check_data import EARLIER_VOCAB_SIZE
from lmwright.config.run import Tokenizer
from lmwright.data.dropped import read_made
from lmwright.data.manifest import Manifest, hash_file, read_manifest
from lmwright.data.progress import Progress
from lmwright.data.stage import find_finished_stage, run_stage
from lmwright.data.text.chat import plain_text
from lmwright.data.tokens.bert_vocab import FILE as VOCAB_TXT
from lmwright.data.tokens.bert_vocab import is_bert
from lmwright.data.tokens.gguf_tokenizer import hash_of
from lmwright.data.tokens.hub_tokenizer import fetched_tokenizer, local_tokenizer
from lmwright.data.tokens.normalized import read_rows
from lmwright.data.tokens.tokenizer import TextTokenizer, save_tokenizer, train_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.data.tokens.vocabulary import choose_size, train_bytes
from lmwright.data.workers import worker_pool
from lmwright.errors import UserError

# A chunk is short enough to spread the sample, long enough to keep words whole.
SAMPLE_CHARS = 1 << 14
QUICK_BYTES = 2 << 20  # of text, on which a tokenizer is trained in a second
FILES = ("*.json", "*.model", "*.tiktoken", "merges.txt", "vocab.bpe", "*.jinja")


@dataclass(frozen=True)
class Job:
    """The stage's only part."""

    spec: Tokenizer
    data_dir: str


def make_tokenizer(
    data_dir: str | os.PathLike,
    spec: Tokenizer,
    *,
    model_vocab_size: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Imports `spec.path`, a hub name as of its commit, or trains on the train split of
    `<data_dir>/normalize`.

    model_vocab_size: ids of a trained tokenizer where `spec` says none, if the text suffices.
    Facts: vocab_size, eos_id, bos_id, pad_id, tokenizer_fingerprint. Raises UserError for a
    tokenizer that cannot be read, and for text that has not been normalized yet.
    """
    folder = Path(data_dir).absolute()
    if spec.path is None:
        normalized = read_made(folder / "normalize")
        inputs = {"normalize": normalized}
        if earlier := _earlier(folder, spec, inputs):
            return earlier
        size = choose_size(spec, model_vocab_size, train_bytes(normalized))
        spec = replace(spec, vocab_size=size)
        fingerprint = _training_of(spec)
    else:
        inputs = {}
        fingerprint = _pinned(folder, spec)
        if fingerprint is None:
            local, commit = local_tokenizer(spec.path)
            fingerprint = {"chat_template": spec.chat_template, "files": hashes(local)}
            if commit:
                fingerprint |= {"hub": {"path": spec.path, "commit": commit}}
            spec = replace(spec, path=str(local))
    return run_stage(
        "tokenizer",
        folder / "tokenizer",
        [Job(spec, str(folder))],
        write_tokenizer,
        fingerprint=fingerprint,
        inputs=inputs,
        finish=lambda counts, _temp: counts[0]["about"],
        workers=1,
        progress=progress,
        unit="vocab_size",
    )


def _training_of(spec: Tokenizer) -> dict[str, Any]:
    # how a tokenizer is trained may change with the library
    return {**asdict(spec), "library": tokenizers.__version__}


def _pinned(folder: Path, spec: Tokenizer) -> dict[str, Any] | None:
    """Fingerprint of a finished tokenizer that was fetched under the same hub name: it stays,
    whatever the name stands for by now."""
    made = fetched_tokenizer(folder, spec)
    return made if made and made.get("chat_template") == spec.chat_template else None


def _earlier(folder: Path, spec: Tokenizer, inputs: dict[str, Manifest]) -> Manifest | None:
    """Finished tokenizer of a store that was made when its size did not follow the model."""
    if spec.vocab_size is not None:
        return None
    fingerprint = _training_of(replace(spec, vocab_size=EARLIER_VOCAB_SIZE))
    return find_finished_stage(
        "tokenizer", folder / "tokenizer", 1, fingerprint=fingerprint, inputs=inputs
    )


def write_tokenizer(job: Job, tmp_dir: Path) -> dict[str, Any]:
    """Work of the part: makes and saves the tokenizer; returns its facts. A process of its own
    trains on much text, since the library does not hear Ctrl-C until it is done."""
    spec = job.spec
    if spec.path is None:
        normalized = read_manifest(Path(job.data_dir) / "normalize")
        if min(spec.sample_bytes, train_bytes(normalized)) <= QUICK_BYTES:
            return _write_trained(job, normalized, tmp_dir)
        try:
            with worker_pool(1) as submit:
                about: dict[str, Any] = submit(_write_trained, job, normalized, tmp_dir).result()
                return about
        except BrokenProcessPool:
            raise UserError(
                f"{job.data_dir}: the process that trains the tokenizer died, most likely out of "
                "memory; set a smaller data.tokenizer.sample_bytes"
            ) from None
    tokenizer = import_tokenizer(spec.path)
    if spec.chat_template is not None:
        tokenizer = replace(tokenizer, chat_template=spec.chat_template)
    return _write(tokenizer, tmp_dir)


def _write_trained(job: Job, normalized: Manifest, tmp_dir: Path) -> dict[str, Any]:
    sample = sample_texts(normalized, job.spec.sample_bytes)
    return _write(train_tokenizer(sample, job.spec), tmp_dir)


def _write(tokenizer: TextTokenizer, tmp_dir: Path) -> dict[str, Any]:
    save_tokenizer(tokenizer, tmp_dir)
    names = ("vocab_size", "eos_id", "bos_id", "pad_id")
    about = {n: getattr(tokenizer, n) for n in names}
    return {"about": {**about, "tokenizer_fingerprint": tokenizer.fingerprint}}


def hashes(path: Path) -> dict[str, str]:
    """Hash of each file that the tokenizer may be read from."""
    beside = path if path.is_dir() else path.parent
    if not path.exists():
        raise UserError(f"data.tokenizer.path: {path} does not exist")
    if path.suffix == ".gguf":
        return {path.name: hash_of(path)}
    paths = {p for pattern in FILES for p in beside.glob(pattern) if p.is_file()}
    if is_bert(beside):
        paths.add(beside / VOCAB_TXT)
    if path.is_file():
        sidecars = {path.name, f"{path.name}.json", "tokenizer_config.json", "merges.txt"}
        names = sidecars | {"special_tokens_map.json", "chat_template.jinja", "vocab.bpe"}
        names |= {"vocab.json", "encoder.json", "tokenizer.model"}
        paths = {p for p in paths if p.name in names} | {path}
    return {p.name: hash_file(p) for p in sorted(paths)}


def sample_texts(normalized: Manifest, budget_bytes: int) -> Iterator[str]:
    """Training text of at most `budget_bytes`, spread evenly over the whole corpus.

    Whole documents if all fit; else chunks of them at even distances.
    """
    share = budget_bytes / max(1, train_bytes(normalized))
    owed = 0.0
    for text in _train_texts(normalized):
        if share >= 1:
            yield text
            continue
        for at in range(0, len(text), SAMPLE_CHARS):
            chunk = text[at : at + SAMPLE_CHARS]
            size = len(chunk.encode())
            owed += size * share
            if owed >= size:
                owed -= size
                yield chunk


def _train_texts(normalized: Manifest) -> Iterator[str]:
    for name in sorted(n for n in normalized.files if n.endswith(".parquet")):
        for rows in read_rows(Path(normalized.folder) / name):
            for row in rows:
                if row.split == "train":
                    yield row.text if row.kind == "text" else plain_text(row.text)
