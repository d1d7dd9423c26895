"""A model with its weights, ready to use; out of files here, out of run directories in `load`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from lmwright.config.section import with_overrides
from lmwright.core.contract import HfModel
from lmwright.core.copies import copies_shardings
from lmwright.core.param import Tree, first_difference
from lmwright.core.spread import spread_shardings
from lmwright.core.ternary import cast_as_trained
from lmwright.data.tokens.tokenizer import TextTokenizer, read_json, save_tokenizer
from lmwright.errors import UserError
from lmwright.formats.card import Facts
from lmwright.formats.card_license import license_of
from lmwright.formats.gguf_read import is_headless, open_gguf
from lmwright.formats.hf_layout import HfTensors, slots
from lmwright.formats.hf_read import open_tensors, read_config
from lmwright.formats.hf_stream import check_tensors, from_hf
from lmwright.formats.hf_write import GENERATION
from lmwright.formats.maxtext import MaxTextTensors
from lmwright.formats.open import GGUF, MAXTEXT, Origin
from lmwright.formats.proof import Source
from lmwright.formats.safetensors import refuse_pickles
from lmwright.formats.tokenizer_files import open_tokenizer, prompt_prefix
from lmwright.formats.written import refuse_changed
from lmwright.guard.temporary import temporary_folder
from lmwright.storage.mirror import shown


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, wherever it came from."""

    model: HfModel
    tensors: Mapping[str, np.ndarray]
    """Weights by Hugging Face name, read from the files when they are asked for."""
    tokenizer_dir: Path | None
    facts: Facts
    path: Path
    prefix: tuple[int, ...] | None = None
    """Ids that began each document in training; None leaves it to the tokenizer's file."""
    suffix: tuple[int, ...] = ()
    """Ids that ended each document in training, of a model that reads whole documents."""
    end_ids: tuple[int, ...] = ()
    """Ids that end a text, beside the tokenizer's own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of generation that lie beside the weights, by transformers' names."""
    step: int | None = None
    """Step of the checkpoint in a run directory; None for any other place."""
    reference: Path | None = None
    """Path that transformers can load as this very model."""
    origin: Source | None = field(default=None, repr=False)
    """Source as the files describe it, where `model` was changed since."""
    temporary: TemporaryDirectory | None = field(default=None, repr=False)
    """Folder that must live as long as this does."""
    num_devices: int = 1
    """Devices of this machine that share the weights."""
    num_copies: int = 1
    """Devices of this machine that have all weights each, and compute rows of their own."""
    kept: dict[Any, Tree] = field(default_factory=dict, repr=False, compare=False)
    """Weights in the form in which they were last used."""

    @property
    def place(self) -> str:
        """Name of its place for messages: the URL, where `path` is the copy of a bucket."""
        return shown(self.path)

    def load(self, *, dtype: Any = None, shardings: Tree | None = None) -> Tree:
        """The weights, jax arrays: of a `dtype` or as they are stored, over the model's devices or
        as `shardings` say (`weight_shardings(model.spec(), mesh)`)."""
        if shardings is None and self.num_devices > 1:
            devices = jax.local_devices()[: self.num_devices]
            shardings = spread_shardings(self.model.spec(), devices)
        elif shardings is None and self.num_copies > 1:
            shardings = copies_shardings(self.model.spec(), self.num_copies)
        if isinstance(self.tensors, HfTensors):
            w = self.tensors.weights
            if dtype is not None:
                w = cast_as_trained(self.model.spec(), w, dtype)
            return w if shardings is None else jax.device_put(w, shardings)
        return from_hf(self.model, self.tensors, str(self.path), dtype=dtype, shardings=shardings)

    def check(self) -> None:
        """Raises UserError where the files are not what lmwright wrote there."""
        refuse_changed((self.origin or self).model, self.tensors, self.path)

    @cached_property
    def weights(self) -> Tree:
        """The weights in the dtype in which they are stored, loaded once."""
        return self.load()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer. Raises UserError where the model came without one."""
        if self.tokenizer_dir is None:
            raise UserError(f"{self.path}: has no tokenizer; copy its tokenizer.json there")
        return open_tokenizer(self.tokenizer_dir)

    @property
    def source(self) -> Source | None:
        """Source that transformers can load for comparison; None if it cannot read any."""
        if self.origin is not None or self.reference is None:
            return self.origin
        return Source(self.reference, self.model, self.load)

    def changed(self, overrides: Sequence[str]) -> "LoadedModel":
        """The model with words such as `rope_scaling.factor=4` applied to its fields. Raises
        UserError for a field that weights depend on."""
        if not overrides:
            return self
        model = with_overrides(self.model, overrides, "the model")
        have, want = ({slot.name: slot.shape for slot in slots(m)} for m in (self.model, model))
        if difference := first_difference(have, want):
            name, there, here = difference
            raise UserError(
                f"{' '.join(overrides)}: {name} is {there} in {self.path} and would be {here}; "
                f"change only what no weight depends on (lmwright vocab changes vocabularies)"
            )
        return replace(self, model=model, origin=self.source)

    @property
    def generation(self) -> dict[str, Any]:
        """Settings of generation, with all ids that end a text."""
        ends = {"eos_token_id": list(self.end_ids)} if self.end_ids else {}
        return {**self.settings, **ends}

    @property
    def prompt_prefix(self) -> tuple[int, ...]:
        """Ids that begin every prompt."""
        return prompt_prefix(self.tokenizer) if self.prefix is None else self.prefix


def load_files(place: Origin) -> LoadedModel:
    """The model of a Hugging Face folder, a GGUF file or a checkpoint of MaxText; weights are read
    when they are asked for. Raises UserError where files are missing, damaged or do not agree."""
    if place.kind == MAXTEXT:
        return _open_maxtext(place)
    return _open_gguf(place) if place.kind == GGUF else _open_folder(place)


def _open_maxtext(place: Origin) -> LoadedModel:
    tensors = MaxTextTensors(place.url or place.path, place.model)
    facts = Facts(name=place.path.name, origin="Imported from a checkpoint of MaxText.")
    return LoadedModel(place.model, tensors, None, facts, place.path)


def _open_folder(place: Origin) -> LoadedModel:
    path = place.path
    refuse_pickles(path)  # before what is wrong with a config.json that nobody needs
    model = place.model
    tensors = open_tensors(path, read_config(path))
    check_tensors(slots(model), tensors, str(path))
    return LoadedModel(
        model,
        tensors,
        place.tokenizer_path,
        Facts(
            name=path.absolute().name,
            origin="Imported from a Hugging Face folder.",
            license=license_of(path),
        ),
        path,
        end_ids=_end_ids(path),
        settings=_settings(path),
        reference=path,
    )


def _open_gguf(place: Origin) -> LoadedModel:
    path = place.path
    file, model, tensors = open_gguf(path)
    if is_headless(model):
        raise UserError(
            f"{path}: holds an encoder without its head, as all GGUF files do; open its Hugging "
            "Face folder instead"
        )
    check_tensors(slots(model), tensors, str(path))
    tokenizer_dir, temporary = place.tokenizer_path, None  # a folder beside the file goes first
    if tokenizer_dir == path:
        temporary = temporary_folder()
        tokenizer_dir = Path(temporary.name)
        save_tokenizer(open_tokenizer(path), tokenizer_dir)
    ends = (file.meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return LoadedModel(
        model,
        tensors,
        tokenizer_dir,
        Facts(name=path.stem, origin="Imported from a GGUF file."),
        path,
        end_ids=tuple(int(each) for each in ends if each is not None),
        reference=path,
        temporary=temporary,
    )


def _settings(folder: Path) -> dict[str, Any]:
    """generation_config.json of a folder, without what a release of transformers writes there for
    itself."""
    said = read_json(folder / GENERATION)
    own = ("_from_model_config", "transformers_version")
    return {name: value for name, value in said.items() if name not in own}


def _end_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, according to generation_config.json (or config.json). Raises UserError
    for what is no id."""
    path, name = folder / GENERATION, "eos_token_id"
    config = read_json(path)
    if name not in config:
        path, config = folder / "config.json", read_config(folder)
    said = config.get(name)
    ends = [] if said is None else said if isinstance(said, list) else [said]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ends):
        raise UserError(
            f"{path}: {name} = {json.dumps(said):.60} is neither an id nor a list of ids; correct "
            "it, or download the file again"
        )
    return tuple(ends)
