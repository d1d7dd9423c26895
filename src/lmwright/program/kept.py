"""Kept: what a step that `plan` kept was made of, and what is different where it is not found.

Made: program, devices, options, versions, and the settings and source behind the program
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lmwright
from lmwright.config.fields import without
from lmwright.config.run import PLACE, Run
from lmwright.config.text import join_keys, leaves
from lmwright.data.json_text import parse_json

SECTIONS = ("seed", "model", "objective", "optim", "train", "lora", "mesh")
"""Sections of a run that the compiled program follows from; where data comes from stays private."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """Description of one compiled step."""

    program: str
    """Fingerprint of the program."""
    devices: list
    """[id, kind, place on the torus, core] of each, in the mesh's order."""
    options: dict[str, str]
    versions: dict[str, str | None]
    run: str = ""
    """The run's name."""
    settings: dict[str, Any] | None = None
    """Settings by their dotted names."""
    source: str = ""
    """Hash of lmwright's own files."""

    @classmethod
    def of(
        cls,
        program: str,
        devices: Sequence[Any],
        options: Mapping[str, str],
        versions: Mapping[str, str | None],
        run: Run | None,
    ) -> "Made":
        made = cls(
            program=program,
            devices=json.loads(json.dumps(devices)),
            options=dict(options),
            versions=dict(versions),
        )
        if run is None:
            return made
        return replace(made, run=run.name, settings=_settings(run), source=_source())

    @classmethod
    def read(cls, path: Path) -> "Made | None":
        """Description in a file; None if the file is damaged or of another version."""
        try:
            return cls(**parse_json(path))
        except (OSError, ValueError, TypeError):
            return None

    def to_json(self) -> str:
        """Everything, for a file beside the step."""
        return json.dumps(asdict(self), indent=1)

    @property
    def kinds(self) -> Counter:
        """Number of devices of each kind."""
        return Counter(str(device[1]) for device in self.devices)

    @property
    def is_tpu(self) -> bool:
        return any(kind.startswith("TPU") for kind in self.kinds)


def difference(here: Made, kept: Iterable[Made]) -> str:
    """Differences of the newest kept step of this run from the one that is wanted here, in words;
    empty where none was kept for such devices."""
    same = [made for made in kept if made.run == here.run and made.is_tpu == here.is_tpu]
    if not same or not here.run:
        return ""
    made = min(same, key=lambda one: (_rank(one, here), same.index(one)))
    return f"the step that plan kept is for {_first_difference(made, here)}"


def _rank(made: Made, here: Made) -> int:
    """Number of differences, so that the nearest step is compared."""
    names = ("program", "devices", "options", "versions")
    return sum(getattr(made, name) != getattr(here, name) for name in names)


def _first_difference(made: Made, here: Made) -> str:
    if made.kinds != here.kinds:
        return f"{_devices(made)}, not {_devices(here)}"
    for name, version in here.versions.items():
        if made.versions.get(name) != version:
            return f"{name} {made.versions.get(name)}, not {version}"
    if made.devices != here.devices:
        return "the same chips in other places of the torus"
    if names := _unlike(made.options, here.options):
        return f"other options of XLA: {', '.join(names)}"
    if made.settings is not None and here.settings is not None:
        if names := _unlike(made.settings, here.settings):
            name, more = names[0], f" and {len(names) - 1} more" if names[1:] else ""
            was, now = made.settings.get(name), here.settings.get(name)
            return f"{name} = {was}, not {now}{more}"
    if made.source != here.source:
        return "another version of lmwright's source"
    return "another program"


def _devices(made: Made) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in made.kinds.items())


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def _settings(run: Run) -> dict[str, Any]:
    plain = without(PLACE, run)
    kept = {name: plain[name] for name in SECTIONS if plain[name] is not None}
    kept["data"] = {"pack": plain["data"]["pack"]}
    return json.loads(json.dumps({join_keys(keys): value for keys, value in leaves(kept)}))


@cache
def _source() -> str:
    folder = Path(lmwright.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:32]
