"""Speed and memory of data preparation and loading, against other libraries on the same text.

    python benchmarks/prepare.py                    # 100 MB of text, a few minutes
    python benchmarks/prepare.py --size-mb 2000     # the corpus of the memory figure

Text is the Python standard library's own sources, repeated as jsonl in a temporary folder.
Rates are per core: tokens divided by the CPU seconds of the process and its children.
`datatrove` and `grain` take part where they can be imported.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

SEQ_LEN = 1024
BATCH = 32
STAGES = ("normalize", "tokenizer", "tokenize", "pack", "shuffle")


def write_corpus(path: Path, size: int) -> None:
    """Repeats the standard library's sources until `size` bytes of jsonl are there."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    lines = [json.dumps({"text": f.read_text(errors="replace")}) + "\n" for f in files]
    with open(path, "w") as f:
        while f.tell() < size:
            f.writelines(lines)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


class PeakMemory:
    """Largest memory of this process and its children together while the block runs, MB.

    `all` is resident memory, pages of mapped files included, which the system may drop at
    any time; `own` is without them.
    """

    def __enter__(self) -> "PeakMemory":
        self.all = self.own = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._end.wait(0.05):
            total = shared = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    memory = process.memory_info()
                except psutil.Error:
                    continue
                total, shared = total + memory.rss, shared + memory.shared
            self.all = max(self.all, total / 1e6)
            self.own = max(self.own, (total - shared) / 1e6)


def run_stages(args: argparse.Namespace, folder: Path) -> None:
    """Prepares the corpus stage by stage in this process; prints one line of JSON each."""
    from lmwright.config.run import Data, Pack, Shuffle, Source, Tokenizer
    from lmwright.data.manifest import read_manifest
    from lmwright.data.prepare import prepare

    data = Data(
        dir=str(folder / "data"),
        sources=(Source(path=str(folder / "text.jsonl"), name="stdlib"),),
        tokenizer=Tokenizer(path=args.tokenizer, sample_bytes=5_000_000),
        pack=Pack(method=args.pack),
        shuffle=Shuffle(order="written", epochs=1),
    )
    for stage in STAGES:
        before, begun = cpu_s(), time.perf_counter()
        with PeakMemory() as peak:
            prepare(data, SEQ_LEN, stages=(stage,), workers=args.workers)
        row = {"cpu_s": cpu_s() - before, "wall_s": time.perf_counter() - begun}
        print(json.dumps({"stage": stage, **row, "all": peak.all, "own": peak.own}), flush=True)
    packed = read_manifest(folder / "data" / "pack")
    print(json.dumps({"tokens": packed.total("tokens"), "facts": packed.facts["efficiency"]}))


def sample_texts(path: Path, size: int) -> list[str]:
    """Documents of the first `size` bytes."""
    texts, read = [], 0
    with open(path) as f:
        for line in f:
            texts.append(json.loads(line)["text"])
            read += len(line)
            if read >= size:
                break
    return texts


def datatrove_run(jsonl: Path, tokenizer: Path, folder: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    logger.disable("datatrove")
    steps = [
        JsonlReader(str(jsonl.parent), glob_pattern=jsonl.name),
        DocumentTokenizer(
            str(folder / "dt"),
            local_working_dir=str(folder / "dt-local"),
            tokenizer_name_or_path=str(tokenizer / "tokenizer.json"),
            eos_token=None,
            shuffle_documents=False,
        ),
    ]
    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=str(folder / "dt-log")).run()


def encoders(folder: Path, sample: Path) -> dict[str, Callable[[list[str]], int]]:
    """Ways to turn the same texts into the same ids; each returns how many, or raises."""
    from lmwright.data.tokens.encode import TiktokenEncoder, choose_route, make_encoder
    from lmwright.data.tokens.tokenizer import load_tokenizer

    where = folder / "data" / "tokenizer"
    tokenizer = load_tokenizer(where)
    ways = {
        "tokenizers.encode_batch": lambda texts: sum(
            len(e.ids) for e in tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        )
    }
    route = choose_route(tokenizer)
    encoder = make_encoder(tokenizer, route)
    ways["lmwright encoder"] = lambda texts: sum(map(len, encoder.encode_batch(texts)))
    if route == "tiktoken":
        encoding = TiktokenEncoder(tokenizer)._encoding
        ways["tiktoken"] = lambda texts: sum(len(encoding.encode_ordinary(t)) for t in texts)
    if importlib.util.find_spec("datatrove"):

        def trove(texts: list[str]) -> int:
            out = Path(tempfile.mkdtemp(dir=folder))
            datatrove_run(sample, where, out)
            return sum(p.stat().st_size // 2 for p in (out / "dt").glob("*.ds"))

        ways["datatrove"] = trove
    else:
        print("datatrove is not installed: left out")
    return ways


def compare_encoders(folder: Path, rounds: int) -> dict[str, float]:
    """Tokens per CPU second of each way, best of interleaved rounds."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = sample_texts(folder / "text.jsonl", 8_000_000)
    sample = folder / "sample.jsonl"
    sample.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    ways, best = encoders(folder, sample), {}
    for _ in range(rounds):
        for name, way in ways.items():
            before = cpu_s()
            tokens = way(texts)
            best[name] = max(best.get(name, 0.0), tokens / (cpu_s() - before))
    return best


def compare_loaders(folder: Path, rounds: int, steps: int = 300) -> dict[str, float]:
    """Tokens per CPU second of loaders over the same rows, best of interleaved rounds."""
    from lmwright.data.rows.loader import Loader
    from lmwright.data.rows.store import TokenStore

    store = TokenStore.open(folder / "data")
    flat = folder / "rows.bin"
    with open(flat, "wb") as f:
        for at in range(0, store.epoch_rows, 4096):
            store.records(at, min(at + 4096, store.epoch_rows))["tokens"].tofile(f)
    dtype = store.dtype["tokens"].base
    rows = np.memmap(flat, dtype, mode="r").reshape(-1, SEQ_LEN)
    rng = np.random.default_rng(0)

    def gather() -> None:
        for _ in range(steps):
            rows[rng.integers(0, len(rows), BATCH)].astype(np.int32)

    def through_store() -> None:
        for k in range(steps):
            store.batch(k * BATCH, (k + 1) * BATCH)

    def through_loader() -> None:
        with Loader(store, BATCH, host=None) as loader:
            for k in range(steps):
                loader.batch(k)

    ways = {
        "raw memory-map gather": gather,
        "lmwright store.batch": through_store,
        "lmwright Loader": through_loader,
    }
    if importlib.util.find_spec("grain"):
        import grain

        def through_grain() -> None:
            source = grain.MapDataset.range(len(rows)).seed(0).shuffle()
            batches = source.map(lambda i: rows[i].astype(np.int32)).batch(BATCH).repeat()
            for k in range(steps):
                _ = batches[k]

        ways["grain MapDataset"] = through_grain
    else:
        print("grain is not installed: left out")
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            before = cpu_s()
            way()
            rate = steps * BATCH * SEQ_LEN / (cpu_s() - before)
            best[name] = max(best.get(name, 0.0), rate)
    return best


def print_table(title: str, rates: dict[str, float], base: str) -> None:
    print(f"\n{title}\n{'':<28}{'Mtok per CPU s':>16}{'ratio':>8}")
    for name, rate in rates.items():
        print(f"{name:<28}{rate / 1e6:>16.2f}{rate / rates[base]:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pack", choices=("chunk", "best-fit"), default="best-fit")
    parser.add_argument("--tokenizer", help="tokenizer to import; else one of 8,192 is trained")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stages_in:
        run_stages(args, args.stages_in)
        return
    with tempfile.TemporaryDirectory(prefix="lmwright-prepare-") as temp:
        folder = Path(temp)
        write_corpus(folder / "text.jsonl", args.size_mb * 10**6)
        # a process of its own, so that only preparation counts as memory
        command = [sys.executable, __file__, *sys.argv[1:], "--stages-in", temp]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        *stages, summary = [json.loads(line) for line in out.splitlines() if line[:1] == "{"]
        tokens = summary["tokens"]
        size = (folder / "text.jsonl").stat().st_size
        print(
            f"{size / 1e6:,.0f} MB of jsonl, {tokens / 1e6:,.1f} M tokens, "
            f"{args.workers} workers, rows of {SEQ_LEN}, efficiency {summary['facts']}"
        )
        print(
            f"\n{'stage':<12}{'wall s':>8}{'CPU s':>8}{'Mtok per CPU s':>16}"
            f"{'peak MB':>9}{'own MB':>8}"
        )
        for s in stages:
            rate = tokens / s["cpu_s"] / 1e6
            print(
                f"{s['stage']:<12}{s['wall_s']:>8.1f}{s['cpu_s']:>8.1f}{rate:>16.2f}"
                f"{s['all']:>9.0f}{s['own']:>8.0f}"
            )
        rates = compare_encoders(folder, args.rounds)
        work = next(s["cpu_s"] for s in stages if s["stage"] == "tokenize")
        rates["lmwright tokenize stage"] = tokens / work
        print_table("encoding the same text", rates, "tokenizers.encode_batch")
        rates = compare_loaders(folder, args.rounds)
        print_table(f"loading batches of {BATCH}", rates, "raw memory-map gather")


if __name__ == "__main__":
    main()
