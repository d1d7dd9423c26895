"""Hugging Face folders in and out: the front door.

run directory --+                          +--> generate, eval
                +--> load_model --weights--+
HF folder ------+                          +--> export_hf --> HF folder
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from lmwright.core.param import Tree, count_params, first_difference
from lmwright.data.tokens.tokenizer import TextTokenizer, read_json, save_tokenizer
from lmwright.errors import UserError
from lmwright.formats.card import Facts, facts_of_run
from lmwright.formats.header import no_model
from lmwright.formats.hf_layout import HfTensors, slots, to_hf
from lmwright.formats.hf_read import (
    import_hf,
    model_from_config,
    open_tensors,
    read_config,
)
from lmwright.formats.hf_stream import check_tensors, from_hf
from lmwright.formats.hf_write import MAX_SHARD_BYTES, export_hf, stored_dtype, write_hf
from lmwright.formats.hub import PREFIX, fetch, is_hub_name
from lmwright.formats.places import usable
from lmwright.formats.proof import Proof, Source
from lmwright.formats.safetensors import refuse_pickles
from lmwright.formats.tokenizer_files import has_tokenizer, open_tokenizer, prompt_prefix
from lmwright.formats.written import refuse_changed
from lmwright.models.counts import with_overrides

__all__ = [
    "LoadedModel", "export_command", "export_hf", "from_hf", "import_command", "import_hf",
    "load_model", "to_hf",
]  # fmt: skip


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
    """The model in a run directory (its newest intact checkpoint), an HF folder, a .gguf file
    or under a hub name (`hf://owner/name`). Raises UserError if it is none of these."""
    if is_hub_name(path):
        local, origin = fetch(str(path))
        found = load_model(local)
        name = str(path).removeprefix(PREFIX).partition("@")[0]
        return replace(found, facts=Facts(name=name, origin=f"Imported from {origin}."))
    path = usable(path)
    if (path / "run.toml").exists():
        return _load_run(path, adapter)
    if adapter is not None:
        raise UserError(f"{path}: is no run directory, so it has no adapter {adapter!r}")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if (path / "config.json").exists():
        return _open_folder(path)
    raise no_model(path)


def _open_folder(path: Path) -> LoadedModel:
    refuse_pickles(path)  # before what is wrong with a config.json that nobody needs
    config = read_config(path)
    model = model_from_config(config, str(path / "config.json"))
    tensors = open_tensors(path, config)
    check_tensors(slots(model), tensors, str(path))
    return LoadedModel(
        model,
        tensors,
        path if has_tokenizer(path) else None,
        Facts(name=path.absolute().name, origin="Imported from a Hugging Face folder."),
        path,
        end_ids=_end_ids(path),
        reference=path,
    )


def _open_gguf(path: Path) -> LoadedModel:
    from lmwright.formats.gguf_read import open_gguf
    from lmwright.formats.gguf_tokenizer import tokenizer_of

    file, model, tensors = open_gguf(path)
    check_tensors(slots(model), tensors, str(path))
    tokenizer_dir, kept = None, None
    if has_tokenizer(path.parent):  # somebody put it there: it has the say
        tokenizer_dir = path.parent
    elif (tokenizer := tokenizer_of(file.meta, str(path))) is not None:
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


def _load_run(path: Path, adapter: str | None = None) -> LoadedModel:
    from lmwright.checkpoint.store import load_run_weights

    run, w = load_run_weights(path, adapter=adapter)
    tokenizer_dir, prefix = _run_tokenizer(run, path), ()
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


def _run_tokenizer(run: Any, path: Path) -> Path:
    """The tokenizer kept in the run directory, else that of the prepared data."""
    data_dir = str(run.data.dir)
    if "://" in data_dir and not has_tokenizer(path / "tokenizer"):
        from lmwright.data.rows.store import TokenStore

        return Path(TokenStore.open(data_dir).tokenizer_dir)
    for folder in (path / "tokenizer", Path(data_dir) / "tokenizer"):
        if has_tokenizer(folder):
            return folder
    raise UserError(
        f"{data_dir}/tokenizer: the run's tokenizer is not there; work from the folder in which "
        f"it was trained, or copy the tokenizer to {path / 'tokenizer'}"
    )


def export_command(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    adapter: str | None = None,
) -> Proof:
    """Writes the model at `path` as `out`, a Hugging Face folder or, where its name ends so, a
    .gguf file, and prints the proof. Without a `dtype` the weights stay as they are stored.
    `adapter` names one of a run's, which is merged into its base."""
    loaded = load_model(path, adapter)
    return export_loaded(
        loaded, out, dtype=dtype, max_shard_bytes=max_shard_bytes, overwrite=overwrite
    )


def export_loaded(
    loaded: LoadedModel,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
) -> Proof:
    """The same for a model that is loaded."""
    loaded.check()
    options = {
        "dtype": dtype or stored_dtype(loaded.model, loaded.tensors),
        "facts": loaded.facts,
        "prefix": loaded.prefix,
        "overwrite": overwrite,
        "source": loaded.source,
    }
    if Path(out).suffix == ".gguf":
        from lmwright.formats.gguf_write import write_gguf as write

        if max_shard_bytes is not None:
            raise UserError("max_shard_bytes: a GGUF file is one file; leave it out")
    else:
        write = write_hf
        options["max_shard_bytes"] = MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
    proof = write(loaded.model, loaded.tensors, loaded.load, loaded.tokenizer_dir, out, **options)
    _say(loaded, out, proof)
    return proof


def import_command(
    path: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Proof:
    """Checks a Hugging Face folder or a GGUF file tensor by tensor and writes it as lmwright
    keeps models: safetensors, the tokenizer, convert.json. `generate`, `eval` and `export` take
    the result, as they take the original itself. `overrides` change fields of the model that no
    weight depends on, such as `seq_len=32768`."""
    if not is_hub_name(path) and (Path(path) / "run.toml").exists():
        raise UserError(f"{path}: is a run directory; write its model with lmwright export")
    loaded = load_model(path).changed(overrides)
    return export_loaded(loaded, out, dtype=dtype, overwrite=overwrite)


def _say(loaded: LoadedModel, out: str | Path, proof: Proof) -> None:
    print(f"{out}: {count_params(loaded.model.spec()):,} parameters in {proof.dtype}")
    for line in proof.lines():
        print(f"  {line}")
    if loaded.tokenizer_dir is None:
        print("  no tokenizer: none came with the model")
