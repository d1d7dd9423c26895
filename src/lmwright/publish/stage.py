"""The files to publish, put together in a temporary folder.

run         --our own export--> model, tokenizer, card   (adapters: PEFT's folders)
folder      --links-----------> the files as they lie
.gguf file  --link------------> the file
                      + GGUF variants, if asked; README.md with the hub's metadata
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmwright.data.json_text import parse_json, write_json
from lmwright.data.tokens.gguf_header import gguf_package
from lmwright.errors import UserError
from lmwright.formats.adapter_note import EARLIER_NOTE, NOTE, read_note
from lmwright.formats.adapter_verbs import export_adapter_command, refuse_folder
from lmwright.formats.card import Facts, adapter_card, facts_of_run, files_card
from lmwright.formats.convert import export_loaded
from lmwright.formats.load import load_model, write_run_tokenizer
from lmwright.formats.open import ADAPTER, GGUF, HF, RUN, Origin, gguf_folder, open_place
from lmwright.formats.peft_folder import CONFIG as ADAPTER_CONFIG
from lmwright.program.trainee import training_of
from lmwright.publish.account import check_name, client
from lmwright.publish.card import CARD, Listing, files_table, read_card, write_card
from lmwright.publish.local_names import drop_from_configs, is_local, names_of
from lmwright.storage.hub import PREFIX, is_hub_name

GGUF_FOLDER = "folder of GGUF files"
LARGEST_TEXT = 16 * 2**20  # of files in which a token is looked for
# what an earlier, differently split export of a model or adapter may have left on the hub
STALE = ("model*.safetensors", "model.safetensors.index.json")
GGUF_KINDS = ("bf16", "fp16", "fp32", "q8_0")


@dataclass(frozen=True)
class Subject:
    """A place to be published, and as what."""

    place: Origin
    kind: str
    repo: str
    listing: Listing
    gguf: tuple[str, ...] = ()
    dtype: str | None = None
    adapter: str | None = None

    @property
    def trainees(self) -> tuple[Any, ...]:
        """The adapters of a run that are wanted; none if it trained all weights."""
        training = training_of(self.place.run) if self.kind == RUN else None
        trainees = training.trainees if training and training.freezes else ()
        return tuple(t for t in trainees if self.adapter in (None, t.name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(t.name for t in self.trainees)


@dataclass(frozen=True)
class Staged:
    """A folder ready to be sent."""

    title: str
    metadata: Any
    stale: Sequence[str]


def open_source(name: str | Path) -> tuple[Origin, str]:
    """The place at a path, and its kind. Raises UserError where there is nothing to publish."""
    if is_hub_name(name):
        raise UserError(f"{name}: is on the hub already; give a run directory or a local folder")
    path = Path(os.path.expanduser(name))
    if gguf_folder(path):
        return Origin(GGUF, path), GGUF_FOLDER
    place = open_place(name)
    return place, place.kind


def stated(place: Origin, kind: str) -> Any:
    """Metadata that the card at a place has already; empty if there is none."""
    folder = place.path if place.path.is_dir() else place.path.parent
    card = folder / CARD
    if kind in (RUN, GGUF) or not card.exists():
        return client().ModelCardData()
    return read_card(card.read_text(encoding="utf-8"), str(card)).data


def complete(subject: Subject) -> Subject:
    """The subject with base model, relation and datasets from the run, the card or the adapter,
    where options did not give them. Raises UserError where an adapter's base has no name on the
    hub."""
    place, kind, listing = subject.place, subject.kind, subject.listing
    before, relation, datasets = stated(place, kind), "finetune", listing.datasets
    on_card = [name for name in names_of(before.get("base_model")) if not is_local(name)]
    base = listing.base_model or (on_card[0] if len(on_card) == 1 else on_card) or None
    if kind == RUN:
        for trainee in subject.trainees:
            refuse_folder(place.run, trainee, place.path)
        facts = facts_of_run(place.path)
        base = base or facts.base or None
        datasets = (*datasets, *facts.datasets.values())
        relation = "adapter" if subject.adapters else relation
    elif kind == ADAPTER:
        written = parse_json(place.path / ADAPTER_CONFIG).get("base_model_name_or_path")
        on_hub = isinstance(written, str) and "/" in written and not is_local(written)
        base, relation = base or (written if on_hub else None), "adapter"
    elif kind == HF:
        config = parse_json(place.path / "config.json")
        relation = "quantized" if "quantization_config" in config else relation
    else:
        relation = "quantized"
    if relation == "adapter" and base is None:
        raise UserError(
            f"{place.path}: is an adapter whose base has no name on the hub; publish the base and "
            "add --base-model owner/name, or publish the merged model that `lmwright export` writes"
        )
    _refuse_options(subject)
    for name in names_of(base):
        check_name(name, "--base-model" if listing.base_model else f"base_model of {place.path}")
    changes = {"base_model": base, "relation": relation, "license": before.get("license")}
    changes |= {"license": listing.license} if listing.license else {}
    changes["datasets"] = tuple(dict.fromkeys(datasets))
    return replace(subject, listing=replace(listing, **changes))


def _refuse_options(subject: Subject) -> None:
    if subject.adapter and not subject.adapters:
        every = ", ".join(replace(subject, adapter=None).adapters) or "none"
        raise UserError(
            f"--adapter: {subject.place.path} has no {subject.adapter!r}; there are: {every}"
        )
    if subject.gguf:
        gguf_package()
    if subject.gguf and (subject.adapters or subject.kind not in (RUN, HF)):
        cure = "lmwright export merges an adapter into its base; publish that folder"
        if subject.kind in (GGUF, GGUF_FOLDER):
            cure = "leave it out, or publish the model that they were made of"
        raise UserError(f"--gguf: {subject.place.path} is not a model to convert; {cure}")


def stage(subject: Subject, folder: Path, step: int | None = None) -> Staged:
    """Fills a folder, which is empty, with what is published: of a run at a step, or the newest."""
    folder.mkdir(exist_ok=True)
    name, facts = subject.repo.rpartition("/")[2], None
    made = () if subject.adapters else GGUF_KINDS
    stale = (*STALE, *(_gguf_name(subject, kind) for kind in made))
    title = name
    if subject.kind == RUN:
        place = replace(subject.place, step=subject.place.step if step is None else step)
        facts = facts_of_run(place.path, place.step)
        title = facts.name if place.step is None else f"step {place.step} of {facts.name}"
        bare = _export_run(subject, place, folder, facts)
    else:
        _link(subject.place.path, folder)
        drop_from_configs(folder)
        stale = stale if subject.kind == HF else ()
        bare = _bare_card(subject, folder, name)
        if subject.gguf:
            _write_gguf(subject, load_model(subject.place.path), folder)
    if subject.kind == ADAPTER:
        _name_base(folder, subject.listing.first_base)
    metadata = write_card(folder, subject.repo, subject.listing, facts, bare)
    _refuse_token(folder)
    return Staged(title, metadata, stale)


def _export_run(subject: Subject, place: Origin, folder: Path, facts: Facts) -> str:
    """Exports a run; the text of a card that it has not written itself."""
    path = place.path if place.step is None else place.path / "checkpoints" / str(place.step)
    listing, names = subject.listing, subject.adapters
    if not names:
        loaded = load_model(path, subject.adapter)
        with _called(subject.repo, folder):
            export_loaded(loaded, folder, dtype=subject.dtype)
        _write_gguf(subject, loaded, folder)
        return ""
    folders = names if names[1:] else ()
    for name in names:
        out = folder / name if folders else folder
        with _called(subject.repo, folder):
            export_adapter_command(path, out, adapter=name)
        _name_base(out, listing.first_base)
    if folders:
        write_run_tokenizer(place.run, place.path, folder)
    return _adapter_card(subject, facts, folders, folder / names[0] if folders else folder)


def _bare_card(subject: Subject, folder: Path, name: str) -> str:
    """Card of a folder that came without one."""
    if subject.kind == ADAPTER:
        return _adapter_card(subject, Facts(name), (), folder)
    return files_card(name, subject.listing.license_text, files_table(folder))


def _adapter_card(subject: Subject, facts: Facts, folders: tuple[str, ...], adapter: Path) -> str:
    """Card of adapters in `folders`, of which `adapter` is one."""
    listing = subject.listing
    base, license = listing.first_base, listing.license_text
    head, kind = {}, "CausalLM"
    note = read_note(adapter)
    if "labels" in note:
        head = {"num_labels": max(1, len(note["labels"]))}
        if "pooling" in note and not note.get("only_pooling"):  # which its class would not take
            head |= {"classifier_pooling": note["pooling"]}
        kind = f"{'Sequence' if 'pooling' in note else 'Token'}Classification"
    elif "answers" in note:
        kind = "QuestionAnswering"
    elif "length" in note:
        kind = ""
    return adapter_card(
        facts, subject.repo, base=base, license=license, folders=folders, kind=kind, head=head
    )


def _write_gguf(subject: Subject, loaded: Any, folder: Path) -> None:
    for kind in subject.gguf:
        with _called(subject.repo, folder):
            export_loaded(loaded, folder / _gguf_name(subject, kind), dtype=kind)


@contextmanager
def _called(repo: str, folder: Path) -> Iterator[None]:
    """Context in which what is printed of the temporary folder has the name of the repository."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        print(said.getvalue().replace(str(folder), repo), end="")


def _gguf_name(subject: Subject, kind: str) -> str:
    return f"{subject.repo.rpartition('/')[2]}-{kind.upper()}.gguf"


def _name_base(folder: Path, base: str) -> None:
    """An adapter's files name its base as the hub does, not by where it lay on this machine."""
    for file, key, value in (
        (ADAPTER_CONFIG, "base_model_name_or_path", base),
        (NOTE, "base", f"{PREFIX}{base}"),
        (EARLIER_NOTE, "base", f"{PREFIX}{base}"),
    ):
        for path in folder.rglob(file):
            fields = parse_json(path) | {key: value}
            path.unlink()  # which may be a link to the user's own
            write_json(path, fields)


def _link(source: Path, folder: Path) -> None:
    """Links to the files of a folder, or to one file, without what is hidden."""
    if source.is_file():
        beside = source.with_name(f"{source.name}.convert.json")
        for path in (source, *([beside] if beside.exists() else ())):
            (folder / path.name).symlink_to(path.absolute())
        return
    for root, folders, files in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                link = folder / path.relative_to(source)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.absolute())


def _refuse_token(folder: Path) -> None:
    """Raises UserError for a file that holds the hub's token."""
    token = client().get_token()
    for path in folder.rglob("*") if token else ():
        if path.is_file() and path.stat().st_size <= LARGEST_TEXT:
            if token.encode() in path.read_bytes():
                name = path.relative_to(folder)
                raise UserError(f"{name}: holds your token for the hub; remove it from there")


def metadata_text(metadata: Any) -> str:
    """Metadata for people, line by line."""
    fields = metadata.to_dict()
    return "\n".join(f"  {name}: {_shown(value)}" for name, value in fields.items())


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
