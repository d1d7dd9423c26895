"""Stale data: prepared with settings that the run no longer has, which would have no effect."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmwright.config.run import Data, Run
from lmwright.data.dropped import read_made
from lmwright.data.manifest import DROPPED, MANIFEST, STAGES, Manifest, parse_manifest
from lmwright.data.sources.files import find_files, source_names
from lmwright.data.stored import read_small, size_of
from lmwright.data.tokens.hub_tokenizer import on_hub
from lmwright.errors import UserError
from lmwright.guard.redact import redact_tree
from lmwright.guard.urls import without_secrets
from lmwright.storage.bucket import is_bucket
from lmwright.storage.hub import PREFIX, is_hub_name

STATE = "stage.json"
METRICS = "metrics.jsonl"
WINDOWS = (("window_tokens", "window_tokens"), ("window_overlap", "overlap"))
"""Fields of an objective with windows, and their names in what the stage records."""
MOST_SHOWN = 3
LONGEST_SHOWN = 60
ELSEWHERE = ("name", "weight")
"""Settings of a source that are compared as such, or in another stage."""
UNSAID: dict[str, Any] = {"prompts": {}, "unlabeled": [], "sample_tokens": None}
"""Settings of a source that are recorded where there are any."""

Change = tuple[str, Any, Any]
"""A field, its value when the data was prepared, and its value now."""


def refuse_stale(run: Run) -> None:
    """Raises UserError where a run that has not begun names other settings of its data than the
    prepared data has, or `prepare` has not come to its rows yet; prints a note where a file of a
    source has another size since, or one more is there.

    A run that has begun is compared with its own run.toml.
    """
    data = run.data
    if has_begun(run.dir):
        return
    changes = [*find_changes(data), *_window_changes(run)]
    if changes:
        shown = [
            f"{path} is {_show(then)} there and {_show(now)} here" for path, then, now in changes
        ]
        more = len(changes) - MOST_SHOWN
        raise UserError(
            f"data.dir: {data.dir} was prepared with other settings: "
            f"{', '.join(shown[:MOST_SHOWN])}{f', and {more} more' if more > 0 else ''}; "
            "run `lmwright prepare` to make it again, or choose another data.dir"
        )
    if unfinished := _unfinished(data):
        raise UserError(
            f"data.dir: in {data.dir}, {unfinished}; run `lmwright prepare` again to finish it, or "
            "choose another data.dir"
        )
    for files, what in ((_find_changed_files(data), "changed"), (_find_new_files(data), "came")):
        if paths := list(files):
            others = " and others" if paths[1:] else ""
            print(
                f"note: {paths[0]}{others} {what} since {data.dir} was prepared; training uses "
                "what was prepared"
            )


def _unfinished(data: Data) -> str | None:
    """Words for a stage that is behind another, as `prepare` leaves it where it is killed or has a
    --stage, so that the rows are still those of before; None where all go together."""
    made = {stage: _finished(data, stage) for stage in STAGES}
    for stage, manifest in made.items():
        if manifest is None and stage in ("pack", "shuffle"):
            return None  # opening the store says what is wrong
        if manifest is None:
            files = [read_small(data.dir, f"{stage}/{n}") for n in (MANIFEST, DROPPED, STATE)]
            if not any(files[:2]) and files[2]:
                return f"{stage} was interrupted"
            continue
        for name, read in manifest.fingerprint.get("inputs", {}).items():
            now = made.get(name)
            if now is not None and now.hash != read:
                return f"{name} is newer than {stage}"
    return None


def has_begun(run_dir: str) -> bool:
    """True for a run directory whose run has measured something, or that is not reached."""
    try:
        return read_small(run_dir, "run.toml") is not None and size_of(run_dir, METRICS) > 0
    except Exception:  # of any kind by the client of a bucket that only the hosts may read
        return True  # opening the run directory says what is wrong


def find_changes(data: Data) -> Iterator[Change]:
    """Settings in which prepared data differs from what the run says, by field; of those that the
    stages record. Stages and fields that are not recorded are equal."""
    yield from _normalize_changes(data)
    yield from _tokenizer_changes(data)
    tokenize, pack, shuffle = (_recorded(data, name) for name in ("tokenize", "pack", "shuffle"))
    yield from _changes("data.tokenize", tokenize, {"prepend", "append"}, data.tokenize)
    chat = (tokenize.get("conversations") or {}).get("chat", {})
    yield from _changes("data.chat", chat, set(chat), data.chat)
    yield from _changes("data.pack", pack, {"method", "attention"}, data.pack)
    yield from _changes("data.shuffle", shuffle, {"order", "seed", "block_rows"}, data.shuffle)
    weights = dict(zip(shuffle.get("sources", ()), shuffle.get("weights", ()), strict=False))
    for i, (name, source) in enumerate(zip(source_names(data.sources), data.sources, strict=True)):
        if name in weights and weights[name] != source.weight:
            yield f"data.sources.{i}.weight", weights[name], source.weight
        limits = (tokenize.get("lengths") or {}).get(name, (None, None))
        for field, then in zip(("min_tokens", "max_tokens"), limits, strict=True):
            if tokenize and then != (now := getattr(source, field)):
                yield f"data.sources.{i}.{field}", then, now
    template = (tokenize.get("conversations") or {}).get("template")
    now = None if template is None else _template_now(data)
    if now not in (None, template):
        yield "data.chat.template", "another text", "what its file has now"


def _template_now(data: Data) -> str | None:
    """Text of the chat template that a file or a folder's tokenizer has now; None where it is not
    on this machine, or the tokenizer's files are as they were."""
    from lmwright.data.text.chat_template import BUILT_IN

    name, spec = data.chat.template, data.tokenizer
    if name not in (*BUILT_IN, "none", "tokenizer"):  # a file
        with suppress(OSError, UnicodeDecodeError):
            return Path(name).expanduser().read_text("utf-8")
    if name != "tokenizer" or spec.chat_template is not None or not spec.path:
        return None
    recorded = _recorded(data, "tokenizer").get("files")
    if recorded is None or not os.path.exists(spec.path):
        return None
    from lmwright.data.tokens.tokenizer_formats import import_tokenizer
    from lmwright.data.tokens.tokenizer_stage import hashes

    same = hashes(Path(spec.path)) == recorded
    return None if same else import_tokenizer(spec.path).chat_template


def _window_changes(run: Run) -> Iterator[Change]:
    """Windows of questions, which the objective says."""
    made = _recorded(run.data, "tokenize").get("classes") or {}
    if run.objective.windows and "window_tokens" in made:
        for (field, key), now in zip(WINDOWS, run.objective.windows, strict=True):
            if made[key] != now:
                yield f"objective.{field}", made[key], now


def _normalize_changes(data: Data) -> Iterator[Change]:
    recorded = _recorded(data, "normalize")
    parts = {part["name"]: part for part in recorded.get("parts", ())}
    if not parts:
        return
    names = source_names(data.sources)
    if sorted(parts) != sorted(names):
        yield "data.sources", sorted(parts), sorted(names)
        return
    for i, name in enumerate(names):
        then, source = {**UNSAID, **parts[name]["source"]}, data.sources[i]
        moved = "://" in source.path or is_bucket(data.dir)  # prepared on another machine, maybe
        fields = set(then) - set(ELSEWHERE) - ({"path"} if moved else set())
        yield from _changes(f"data.sources.{i}", then, fields, source)
    first = next(iter(parts.values()))
    yield from _changes("data", first, {"holdout_fraction"}, data)
    yield from _changes("data.normalize", first | recorded, {"unicode", "dedup"}, data.normalize)


def _tokenizer_changes(data: Data) -> Iterator[Change]:
    """A tokenizer that was trained otherwise, or is another one; a path that is not on this machine
    counts as the same. Those of the hub are told by their names."""
    made, spec = _finished(data, "tokenizer"), data.tokenizer
    recorded = made.fingerprint.get("fingerprint", {}) if made else {}
    imported = "files" in recorded
    if recorded and spec.path is None and not imported:
        names = {"train", "special_tokens", "sample_bytes"}
        sized = set() if spec.vocab_size is None else {"vocab_size"}
        yield from _changes("data.tokenizer", recorded, names | sized, spec)
    elif recorded and spec.path is None:
        yield "data.tokenizer.path", recorded.get("hub", {}).get("path", "another"), None
    elif recorded and on_hub(spec.path):
        hub = recorded.get("hub", {})  # without it, a folder's or a name's that was none of the hub
        known = {name.removeprefix(PREFIX) for name in hub.values()}
        differs = spec.path.removeprefix(PREFIX) not in known
        if differs and (hub or (is_hub_name(spec.path) and not imported)):
            yield "data.tokenizer.path", hub.get("path"), spec.path
    elif recorded and os.path.exists(spec.path):
        from lmwright.data.tokens.tokenizer_formats import import_tokenizer
        from lmwright.data.tokens.tokenizer_stage import hashes

        if imported and hashes(Path(spec.path)) == recorded["files"]:
            return
        if import_tokenizer(spec.path).fingerprint != made.facts.get("tokenizer_fingerprint"):
            yield "data.tokenizer.path", "another" if imported else None, spec.path


def _changes(section: str, then: dict[str, Any], names: set[str], now: Any) -> Iterator[Change]:
    values = json.loads(json.dumps(redact_tree(asdict(now), without_secrets), default=str))
    for name in sorted(names & then.keys() & values.keys()):
        if then[name] != values[name]:
            yield f"{section}.{name}", then[name], values[name]


def _find_changed_files(data: Data) -> Iterator[str]:
    """Local files of the sources that have another size, or were written since. Some may not be
    there: data may be trained on where its sources are not."""
    parts = _recorded(data, "normalize").get("parts", ())
    files = {s["file"]["path"]: s["file"] for part in parts for s in part["slices"]}
    made_ns = _made_ns(data)
    for path, file in files.items():
        with suppress(OSError):
            if "://" in path:
                continue
            now = os.stat(path)
            later = made_ns is not None and now.st_mtime_ns > made_ns
            later = later and str(now.st_mtime_ns) != file.get("stamp")
            if later or now.st_size != file["size"]:
                yield path


def _find_new_files(data: Data) -> Iterator[str]:
    """Local files that the sources have now, and had not; of sources some of whose files are where
    they were, since data may be trained on where others lie."""
    parts = _recorded(data, "normalize").get("parts", ())
    made_ns = _made_ns(data)
    if made_ns is None or any(
        part["source"].get("sample_tokens") or part.get("portion") for part in parts
    ):
        return  # not all files were read
    for name, source in zip(source_names(data.sources), data.sources, strict=True):
        known = {s["file"]["path"] for part in parts if part["name"] == name
                 for s in part["slices"]}  # fmt: skip
        if "://" in source.path or not any(map(os.path.exists, known)):
            continue
        with suppress(UserError, OSError):
            for path in sorted({file.path for file in find_files(source, data.dir)} - known):
                if os.stat(path).st_ctime_ns > made_ns:  # others were there, and empty
                    yield path


def _made_ns(data: Data) -> int | None:
    """Time at which the texts were read; None for data in a bucket."""
    try:
        return os.stat(Path(data.dir, "normalize", MANIFEST)).st_mtime_ns
    except OSError:
        return None


def _recorded(data: Data, stage: str) -> dict[str, Any]:
    """Settings that a stage was made with; none where it is not there."""
    made = _finished(data, stage)
    return made.fingerprint.get("fingerprint", {}) if made else {}


def _finished(data: Data, stage: str) -> Manifest | None:
    try:
        return _read_made(data.dir, stage)
    except UserError:
        return None  # opening the store says what is wrong


def _read_made(url: str, stage: str) -> Manifest | None:
    if not is_bucket(url):
        return read_made(Path(url) / stage)
    raw = read_small(url, f"{stage}/{MANIFEST}")
    return None if raw is None else parse_manifest(raw, f"{url}/{stage}")


def _show(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
