"""The one door: what lies at a path or under a name, decided here and nowhere else.

    run file                                            --load_run----> Run
    run directory, a checkpoint in it, Hugging Face
    folder, GGUF file, PEFT folder, hf://owner/name     --open_place--> Origin
    any of these but a PEFT folder, or a preset         --find_model--> model, without weights

An Origin reads what it is asked for and nothing else; `formats.load` adds the weights. Run files
are read here because `train.init_from` may name any place.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lmwright import models, objectives, optim, presets
from lmwright.config.errors import LIST_PRESETS, nearest
from lmwright.config.fields import to_plain
from lmwright.config.load import RunFiles
from lmwright.config.run import Run
from lmwright.config.section import with_overrides
from lmwright.config.text import lost_run
from lmwright.data.tokens.gguf_tokenizer import holds_tokenizer
from lmwright.errors import UserError
from lmwright.formats.hub import fetch, fetch_kaggle
from lmwright.formats.peft_folder import CONFIG as ADAPTER_CONFIG
from lmwright.formats.places import refuse_pipes, usable
from lmwright.formats.safetensors import NO_PICKLES, PICKLES, refuse_pickles
from lmwright.formats.tokenizer_files import has_tokenizer
from lmwright.models.conversion import converted
from lmwright.presets.dial import dial
from lmwright.presets.sources import source_fields
from lmwright.program import lora_section, qat_section
from lmwright.program.length import epoch_rows
from lmwright.storage.bucket import is_bucket
from lmwright.storage.hub import PREFIX, is_hub_name
from lmwright.storage.kaggle import is_kaggle_name
from lmwright.storage.mirror import fetched, mirror_folder, shown

RUN, HF, GGUF, ADAPTER = "run directory", "Hugging Face folder", "GGUF file", "adapter folder"
MAXTEXT = "MaxText checkpoint"
HUB_LIKE = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
MODEL_PLACES = "a run directory, a Hugging Face model folder, a .gguf file or hf://owner/name"


@dataclass(frozen=True)
class Origin:
    """A place, read lazily."""

    kind: Literal[
        "run directory", "Hugging Face folder", "GGUF file", "adapter folder", "MaxText checkpoint"
    ]
    path: Path
    """Path on this machine."""
    step: int | None = None
    """Step of a run's checkpoint; None takes the newest."""
    hub: str = ""
    """`hf://owner/name@commit` that it was fetched from."""
    url: str = ""
    """Address of a checkpoint that is read where it lies."""
    given: Any = None
    """Model of a checkpoint that does not say its own."""

    @cached_property
    def run(self) -> Run:
        """The run of a run directory; no other place has one."""
        return load_run(self.path / "run.toml")

    @cached_property
    def model(self) -> Any:
        """The model, from its header alone. Raises UserError for an adapter, or for a model that
        lmwright does not compute."""
        from lmwright.formats.hf_read import model_from_config, read_config

        if self.kind == RUN:
            return self.run.model
        if self.kind == MAXTEXT:
            return self.given
        if self.kind == GGUF:
            return self._gguf[1]
        if self.kind == HF:
            return model_from_config(read_config(self.path), str(self.path / "config.json"))
        raise UserError(
            f"{self.path}: is an adapter, which has no model of its own; merge it into its base "
            f"with lmwright adapters merge"
        )

    @cached_property
    def _gguf(self) -> tuple[Any, ...]:
        """The file of a GGUF file, its model and its tensors."""
        from lmwright.formats.gguf_read import open_gguf

        return open_gguf(self.path)

    @property
    def spec(self) -> Any:
        """The weights that it holds for use elsewhere, as Params."""
        if self.kind != RUN:
            return self.model.spec()
        objective, model = self.run.objective, self.model
        return objective.exported(model, objective.spec(model))[1]

    @cached_property
    def tokenizer_path(self) -> Path | None:
        """The folder of the tokenizer that lies beside the weights, or else the GGUF file that
        holds it; None where there is none."""
        folder = self.path
        if self.kind == RUN:
            folder = self.path / "tokenizer"
        elif self.kind == GGUF:
            folder = self.path.parent
        if has_tokenizer(folder):
            return folder
        return self.path if self.kind == GGUF and holds_tokenizer(self._gguf[0].meta) else None


def open_place(name: str | Path, *, header: bool = False) -> Origin:
    """Origin at a path or under a hub name, of which only config.json is fetched if only the
    `header` is needed. Raises UserError if there is nothing that lmwright reads."""
    if is_hub_name(name):
        path, commit = fetch(str(name), only=["config.json"] if header else ())
        return replace(_open_path(path), hub=commit)
    if is_kaggle_name(name):
        return _open_path(fetch_kaggle(str(name), header))
    if is_bucket(name):
        return _open_path(fetched(name))
    if "://" in str(name):
        raise UserError(f"{name}: cannot load a model from this URL; write {PREFIX}owner/name")
    return _open_path(usable(os.path.expanduser(name)))


def open_origin(name: str | Path, model: Any, *, header: bool = False) -> Origin:
    """The place that `open_place` finds, or a checkpoint of MaxText, which holds a `model` of the
    caller's."""
    from lmwright.formats.maxtext import items_of

    path = os.fspath(name)
    if "://" not in path or is_bucket(path):
        if items_of(os.path.expanduser(path)) is not None:
            return Origin(MAXTEXT, Path(path), url=path if is_bucket(path) else "", given=model)
    return open_place(name, header=header)


def gguf_folder(path: Path) -> bool:
    """True for a folder of GGUF files, which is no model by itself."""
    if (path / "run.toml").exists() or (path / "config.json").exists():
        return False
    return path.is_dir() and next(path.rglob("*.gguf"), None) is not None


def open_run(path: str | Path) -> Origin:
    """The run directory at a path, or around the checkpoint there. Raises UserError for anything
    else."""
    local = fetched(path) if is_bucket(path) else usable(os.path.expanduser(path))
    if (place := _run_at(local)) is None:
        refuse_run_file(local)
        raise UserError(f"{path}: not a run directory (no run.toml); train one first")
    return place


def refuse_run_file(path: str | Path) -> None:
    """Raises UserError for a run file in the place of what it trains, with the run's directory."""
    path = Path(os.path.expanduser(path))
    if path.suffix == ".toml" and path.is_file():
        there = ""
        with suppress(UserError):
            there = f" ({load_run(path).dir})"
        raise UserError(f"{path}: is a run file; give the directory{there} in which it trained")


def _run_at(path: Path) -> Origin | None:
    folder, step = path, None
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        folder, step = path.parent.parent, int(path.name)
    return Origin(RUN, folder, step) if (folder / "run.toml").exists() else None


def _open_path(path: Path) -> Origin:
    refuse_pipes(path)
    if (place := _run_at(path)) is not None:
        return place
    if path.suffix == ".gguf":
        return Origin(GGUF, path)
    if (path / "config.json").exists():
        return Origin(HF, path)
    if (path / ADAPTER_CONFIG).exists():
        return Origin(ADAPTER, path)
    refuse_run_file(path)
    raise _nothing_at(path)


def _nothing_at(path: Path) -> UserError:
    """The error for a path with nothing that lmwright reads."""
    from lmwright.formats.maxtext import items_of

    name = shown(path)  # the URL that the user gave, not its copy on this machine
    if path.is_file() and any(path.match(pattern) for pattern in PICKLES):
        return UserError(f"{name}: holds pickled weights, {NO_PICKLES}")
    what = "is not there"
    if path.is_dir():
        refuse_pickles(path)
        if lost := lost_run(path):
            return UserError(lost)
        if items_of(path) is not None:
            return UserError(
                f"{name}: looks like a checkpoint of MaxText, which does not say its model; write "
                f"lmwright import {name} OUT --model PRESET, and give OUT, or in a run set [model]"
            )
        what = "holds neither run.toml nor config.json"
    elif path.suffix == ".safetensors":
        what = "holds only weights, without the config.json that says what they mean"
    elif path.exists():
        what = "is not a folder"
    lost = what == "is not there" and not path.is_absolute()
    seen = f", seen from {Path.cwd()}" if lost else ""
    elsewhere = "/" not in str(path) or not path.parent.exists()  # else a folder of this machine
    if lost and path.parts[:1] in (("runs",), ("quickstart",)):  # of the manual, not of the hub
        return UserError(f"{name}: {what}{seen}; train it first, or give {MODEL_PLACES}")
    if what == "is not there" and elsewhere and HUB_LIKE.fullmatch(str(path)):
        hub = f"for a model from the hub, write {PREFIX}{path}"
        if "/" not in str(path):
            hub = f"a model from the hub is named with its owner, as in {PREFIX}owner/{path}"
        return UserError(f"{name}: {what}{seen}; {hub}; otherwise give {MODEL_PLACES}")
    return UserError(f"{name}: {what}{seen}; give {MODEL_PLACES}")


def is_run(name: str | Path) -> bool:
    """True if a name means a run: a run file, or a folder that holds one."""
    path = fetched(name)
    return path.suffix == ".toml" or (path / "run.toml").exists()


def find_model(name: str, overrides: Sequence[str] = ()) -> Any:
    """The model of a preset, a run file, a run directory, a Hugging Face folder, a GGUF file or a
    hub name, with `model.field=value` overrides; for a classifier or an embedder, its encoder. No
    weights are read. Raises UserError where there is none of that name."""
    if is_run(name):
        return load_run(name, overrides).model
    if Path(name).exists() or name.endswith(".gguf") or "://" in name:
        place = open_place(name, header=True)
        if place.kind == RUN:  # named by a checkpoint in it
            return load_run(place.path, overrides).model
        from lmwright.models.over import encoder_of

        model = encoder_of(place.model)
        return with_overrides(model, overrides, "the model")
    known = presets.of_section("model")
    if name not in known:
        cure = nearest(name, list(known), what="there are", listed_by=LIST_PRESETS)
        if "/" in name and HUB_LIKE.fullmatch(name):
            cure = f"for a model from the hub, write {PREFIX}{name}"
        raise UserError(f"{name}: neither a run file, a preset nor a place of a model; {cure}")
    return with_overrides(known[name](), overrides, "a preset")


def params_command(name: str, overrides: Sequence[str] = ()) -> None:
    """Prints how many weights the model that `find_model` finds has, part by part."""
    from lmwright.models.counts import params_report

    print(params_report(name, find_model(name, overrides)))


def init_fields(
    path: str, run_dir: Any = None, kind: str | None = None
) -> dict[tuple[str, ...], dict[str, Any]]:
    """{section: fields} of a run that starts from `path`: its model, of another `kind` if that is
    set, and its tokenizer's path.

    Where the path is gone, the run directory says what was there when the run began.
    """
    dumped = mirror_folder(run_dir) / "run.toml" if isinstance(run_dir, str) else None
    gone = "://" not in path and not Path(path).expanduser().exists()
    if gone and dumped is not None and dumped.exists():
        run = load_run(dumped)
        model, tokenizer = run.model, run.data.tokenizer.path
    else:
        try:
            place = open_place(path)
            if place.kind == HF:  # before what is wrong with a config.json that nobody needs
                refuse_pickles(place.path)
            model, tokenizer = place.model, place.tokenizer_path
            if kind is not None:
                model = converted(model, kind)
        except UserError as error:
            raise error.at("train.init_from") from error
    from lmwright.models.over import encoder_of

    fields = {("model",): to_plain(encoder_of(model), defaults="omit")}
    if tokenizer is not None:
        fields["data", "tokenizer"] = {"path": str(tokenizer)}
    return fields


def teacher_fields(path: str) -> dict[str, Any]:
    """Fields of the model that a run with objective.teacher = `path` learns from."""
    try:
        model = open_place(path, header=True).model
    except UserError as error:
        raise error.at("objective.teacher") from error
    return to_plain(getattr(model, "encoder", model), defaults="omit")


RUN_FILES = RunFiles(
    kinds={
        "model": models.KINDS,
        "objective": objectives.KINDS,
        "optim": optim.KINDS,
        "lora": lora_section.KINDS,
        "qat": qat_section.KINDS,
    },
    presets={section: presets.of_section(section) for section in presets.SECTIONS},
    recipes=presets.all_recipes(),
    dial=dial,
    origin=init_fields,
    teacher=teacher_fields,
    epoch_rows=epoch_rows,
    sources=source_fields(),
)
load_run = RUN_FILES.load
load_noted = RUN_FILES.load_noted
load_base = RUN_FILES.load_base
resolve_layers = RUN_FILES.resolve_layers
run_schema = RUN_FILES.schema
