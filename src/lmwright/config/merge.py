"""Layers of plain values merged in order, with the origin of each value."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from lmwright.config.text import Keys, join_keys, leaves, line_of
from lmwright.errors import UserError

Provenance = dict[Keys, str]
COMMAND_LINE = "command line"
DEFAULT = "default"
RECIPE = "recipe"  # followed by its name


class Merged:
    """Merged values of several layers; `origin` names the layer of each leaf."""

    def __init__(self, path: Path, lines: dict[Keys, int]):
        self.path = path
        self.lines = lines
        self.values: dict[str, Any] = {}
        self.origin: Provenance = {}
        self.emptied: dict[Keys, dict[Keys, Any]] = {}
        """Values of sections that another kind on the command line has emptied."""

    def where(self, keys: Keys) -> str:
        """Layer, or line of the file, that an error about a value or table should name."""
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.origin:  # itself, or the list that it is an element of
                return self.origin[keys[:end]]
        below = [label for known, label in self.origin.items() if known[: len(keys)] == keys]
        if keys and keys not in self.lines and below:
            return below[0]
        return self._line(keys)

    def _line(self, keys: Keys) -> str:
        """Line of the run file that sets a value or table; the file alone where none is known."""
        line = line_of(self.lines, keys)
        return f"{self.path}:{line}" if line else str(self.path)

    def merge(self, layer: dict[str, Any], label: str | None) -> None:
        """Merges a layer on top; a layer without a label is the run file itself."""
        self._merge(self.values, layer, (), label)

    def drop(self, section: str) -> None:
        """Removes a whole section."""
        self.values.pop(section, None)
        self._forget((section,))

    def drop_recipe(self, keys: Keys) -> None:
        """Removes a value, or a list of values, that a recipe sets."""
        if any(k[: len(keys)] == keys and at.startswith(RECIPE) for k, at in self.origin.items()):
            inner = self.values
            for key in keys[:-1]:
                inner = inner[key]
            del inner[keys[-1]]
            self._forget(keys)

    def put(self, keys: Keys, value: Any) -> None:
        """Applies one override; a number in `keys` selects an element of a list."""
        inner: Any = self.values
        for place, key in enumerate(keys[:-1]):
            self._check_step(inner, keys[:place], key)
            inner = inner[key] if isinstance(inner, list) else inner.setdefault(key, {})
        self._check_step(inner, keys[:-1], keys[-1])
        if isinstance(inner, dict):
            self._merge(inner, {keys[-1]: value}, keys[:-1], COMMAND_LINE)
        else:
            inner[keys[-1]] = value
            known = keys[:-1] if keys[:-1] in self.origin else keys
            self._forget(known)
            self.origin[known] = COMMAND_LINE

    def _check_step(self, inner: Any, keys: Keys, key: str | int) -> None:
        name = join_keys(keys)
        if isinstance(inner, list):
            if not isinstance(key, int) or key >= len(inner):
                raise UserError(
                    f"{COMMAND_LINE}: {join_keys((*keys, key))}: {name} is a list of {len(inner)}; "
                    f"pick an element by its number from 0, as in {name}.0"
                )
        elif not isinstance(inner, dict):
            raise UserError(
                f"{COMMAND_LINE}: {join_keys((*keys, key))}: {name} is a value without fields; "
                f"set {name} itself"
            )
        elif isinstance(key, int):
            raise UserError(
                f"{COMMAND_LINE}: {join_keys((*keys, key))}: {name} is not a list in the run file; "
                "write the whole list there"
            )

    def _merge(
        self, into: dict[str, Any], layer: dict[str, Any], keys: Keys, label: str | None
    ) -> None:
        if "kind" in layer and into.get("kind", layer["kind"]) != layer["kind"]:
            if label == COMMAND_LINE:
                self.emptied[keys] = dict(leaves(into, keys))
            into.clear()
            self._forget(keys)
        for key, value in layer.items():
            path = (*keys, key)
            if isinstance(value, dict):
                if not isinstance(into.get(key), dict):
                    self._forget(path)
                    into[key] = {}
                self._merge(into[key], value, path, label)
            else:
                self._forget(path)
                into[key] = deepcopy(value)
                for leaf, _ in leaves(value, path):
                    self.origin[leaf] = label or self._line(leaf)

    def _forget(self, keys: Keys) -> None:
        for known in [known for known in self.origin if known[: len(keys)] == keys]:
            del self.origin[known]
