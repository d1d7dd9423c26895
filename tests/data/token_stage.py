"""Makes a finished tokenize stage out of given documents, by the contract between the stages."""

from pathlib import Path

import numpy as np

from lmwright.data.stage import run_stage

VOCAB = 500
EOS = 3


def write_tokens(part, tmp_dir):
    """A part: {(split, source): [(ids, utf-8 bytes), ...]} with its number and dtype."""
    counts = {}
    for (split, source), docs in part["docs"].items():
        folder = tmp_dir / split / source
        folder.mkdir(parents=True)
        name = folder / f"part-{part['number']:05d}"
        ids = np.concatenate([np.asarray(d, part["dtype"]) for d, _ in docs] or [[]])
        ids.astype(part["dtype"]).tofile(f"{name}.tokens.bin")
        ends = np.cumsum([len(d) for d, _ in docs])
        table = np.stack([ends, [n for _, n in docs]], axis=1).astype(np.int64)
        np.save(f"{name}.docs.npy", table.reshape(-1, 2))
        entry = {"docs": len(docs), "tokens": len(ids), "bytes": sum(n for _, n in docs)}
        counts.setdefault(split, {})[source] = entry
    return counts


def tokenize_stage(data_dir: Path, parts, dtype="uint16", key=0):
    """parts: list of {(split, source): [(ids, utf-8 bytes), ...]}."""
    facts = {"vocab_size": VOCAB, "dtype": dtype, "eos_id": EOS, "tokenizer_fingerprint": "abc"}
    work = [{"number": i, "dtype": dtype, "docs": docs} for i, docs in enumerate(parts)]
    fingerprint = {"key": key}
    return run_stage(
        "tokenize",
        data_dir / "tokenize",
        work,
        write_tokens,
        fingerprint=fingerprint,
        facts=facts,
        workers=1,
    )


def random_documents(rng, count, longest, shortest=1):
    """Documents ended by EOS; byte counts that are no multiple of the token counts."""
    docs = []
    for size in rng.integers(shortest, longest + 1, count).tolist():
        ids = rng.integers(EOS + 1, VOCAB, size).tolist()
        docs.append(([*ids[:-1], EOS], int(rng.integers(size, 6 * size + 2))))
    return docs
