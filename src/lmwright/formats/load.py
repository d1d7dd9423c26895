"""Any model with its weights, ready to use.

run directory, Hugging Face folder, GGUF file, hub name --load_model--> LoadedModel
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from lmwright.config.section import with_overrides
from lmwright.core.param import Tree, first_difference
from lmwright.data.tokens.tokenizer import TextTokenizer, read_json, save_tokenizer
from lmwright.errors import UserError
from lmwright.formats.card import Facts, facts_of_run
from lmwright.formats.gguf_read import open_gguf
from lmwright.formats.gguf_tokenizer import tokenizer_of
from lmwright.formats.hf_layout import HfTensors, slots
from lmwright.formats.hf_read import open_tensors, read_config
from lmwright.formats.hf_stream import check_tensors, from_hf
from lmwright.formats.hub import PREFIX
from lmwright.formats.open import GGUF, RUN, Place, open_place
from lmwright.formats.proof import Source
from lmwright.formats.run_dir import load_run_weights, run_tokenizer
from lmwright.formats.safetensors import refuse_pickles
from lmwright.formats.tokenizer_files import open_tokenizer, prompt_prefix
from lmwright.formats.written import refuse_changed


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, wherever it came from."""

    model: Any
    tensors: Mapping[str, np.ndarray]
    """By Hugging Face name; read from the files when they are asked for."""
    tokenizer_dir: Path | None
    facts: Facts
    path: Path
    prefix: tuple[int, ...] | None = None
    """Ids that began each document in training; None leaves it to the tokenizer's file."""
    end_ids: tuple[int, ...] = ()
    """Ids that end a text, beside the tokenizer's own."""
    reference: Path | None = None
    """What transformers can load as this very model."""
    origin: Source | None = field(default=None, repr=False)
    """What the files say, where `model` was changed since."""
    kept: Any = field(default=None, repr=False)
    """What must live as long as this does, such as a temporary folder."""

    def load(self, *, dtype: Any = None, shardings: Tree | None = None) -> Tree:
        """The weights, jax arrays: of a `dtype` or as they are stored, on the first device or
        as `shardings` say (`weight_shardings(model.spec(), mesh)`)."""
        if isinstance(self.tensors, HfTensors):
            w = self.tensors.weights
            if dtype is not None:
                w = jax.tree.map(lambda leaf: leaf.astype(dtype), w)
            return w if shardings is None else jax.device_put(w, shardings)
        return from_hf(self.model, self.tensors, str(self.path), dtype=dtype, shardings=shardings)

    def check(self) -> None:
        """Raises UserError where the files are not what lmwright wrote there."""
        refuse_changed((self.origin or self).model, self.tensors, self.path)

    @cached_property
    def weights(self) -> Tree:
        """`load()`, once: in the dtype in which they are stored."""
        return self.load()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer. Raises UserError where the model came without one."""
        if self.tokenizer_dir is None:
            raise UserError(f"{self.path}: has no tokenizer; copy its tokenizer.json there")
        return open_tokenizer(self.tokenizer_dir)

    @property
    def source(self) -> Source | None:
        """What transformers can be asked about; None where it can read nothing."""
        if self.origin is not None or self.reference is None:
            return self.origin
        return Source(self.reference, self.model, self.load)

    def changed(self, overrides: Sequence[str]) -> "LoadedModel":
        """With words such as `rope_scaling.factor=4` on top of the model's fields. Raises
        UserError for a field that weights depend on."""
        if not overrides:
            return self
        model = with_overrides(self.model, overrides, "the model")
        have, want = ({slot.name: slot.shape for slot in slots(m)} for m in (self.model, model))
        if found := first_difference(have, want):
            name, there, here = found
            raise UserError(
                f"{' '.join(overrides)}: {name} is {there} in {self.path} and would be {here}; "
                f"change only what no weight depends on (lmwright vocab changes vocabularies)"
            )
        return replace(self, model=model, origin=self.source)

    @property
    def prompt_prefix(self) -> tuple[int, ...]:
        """Ids that begin every prompt."""
        return prompt_prefix(self.tokenizer) if self.prefix is None else self.prefix


def load_model(path: str | Path, adapter: str | None = None) -> LoadedModel:
    """The model in a run directory (its newest intact checkpoint, or the one that the path
    names), an HF folder, a .gguf file or under a hub name (`hf://owner/name`). Raises UserError
    if it is none of these."""
    place = open_place(path)
    if place.kind == RUN:
        return _load_run(place, adapter)
    if adapter is not None:
        raise UserError(f"{path}: is no run directory, so it has no adapter {adapter!r}")
    loaded = _open_gguf(place) if place.kind == GGUF else _open_folder(place)
    if not place.hub:
        return loaded
    name = str(path).removeprefix(PREFIX).partition("@")[0]
    return replace(loaded, facts=Facts(name=name, origin=f"Imported from {place.hub}."))


def _open_folder(place: Place) -> LoadedModel:
    path = place.path
    refuse_pickles(path)  # before what is wrong with a config.json that nobody needs
    model = place.model
    tensors = open_tensors(path, read_config(path))
    check_tensors(slots(model), tensors, str(path))
    return LoadedModel(
        model,
        tensors,
        place.tokenizer_dir,
        Facts(name=path.absolute().name, origin="Imported from a Hugging Face folder."),
        path,
        end_ids=_end_ids(path),
        reference=path,
    )


def _open_gguf(place: Place) -> LoadedModel:
    path = place.path
    file, model, tensors = open_gguf(path)
    check_tensors(slots(model), tensors, str(path))
    tokenizer_dir, kept = place.tokenizer_dir, None  # what somebody put beside it has the say
    if tokenizer_dir is None and (tokenizer := tokenizer_of(file.meta, str(path))) is not None:
        kept = TemporaryDirectory(prefix="lmwright-")
        tokenizer_dir = Path(kept.name)
        save_tokenizer(tokenizer, tokenizer_dir)
    ends = (file.meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return LoadedModel(
        model,
        tensors,
        tokenizer_dir,
        Facts(name=path.stem, origin="Imported from a GGUF file."),
        path,
        end_ids=tuple(int(each) for each in ends if each is not None),
        reference=path,
        kept=kept,
    )


def _load_run(place: Place, adapter: str | None) -> LoadedModel:
    path = place.path
    run, w = load_run_weights(path, place.step, adapter=adapter)
    tokenizer_dir, prefix = run_tokenizer(run, path), ()
    if run.data.tokenize.prepend == "bos":
        prefix = (open_tokenizer(tokenizer_dir).bos_id,)
    return LoadedModel(
        run.model, HfTensors(run.model, w), tokenizer_dir, facts_of_run(path), path, prefix
    )


def _end_ids(folder: Path) -> tuple[int, ...]:
    """What generation_config.json (or config.json) says ends a text: one id or several."""
    config = read_config(folder) | read_json(folder / "generation_config.json")
    said = config.get("eos_token_id")
    said = said if isinstance(said, list) else [said]
    return tuple(each for each in said if isinstance(each, int))
