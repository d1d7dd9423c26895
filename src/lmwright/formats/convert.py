"""export and import: any model that lmwright reads, written as a Hugging Face folder or a GGUF
file, with the proof that it is the same."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmwright.core.param import count_params
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError
from lmwright.formats.card import Facts
from lmwright.formats.encoding import stored_dtype
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_write import MAX_SHARD_BYTES, write_hf
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.maxtext import MaxTextTensors, TiedLogits
from lmwright.formats.open import find_model, is_run
from lmwright.formats.proof import Proof
from lmwright.guard.temporary import temporary_folder
from lmwright.storage.mirror import sending


def export_command(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    adapter: str | None = None,
    part: str | None = None,
) -> Proof:
    """Writes the model at `path` as `out`, a Hugging Face folder or, where its name ends so, a
    .gguf file, and prints the proof. Without a `dtype` the weights stay as they are stored.
    `adapter` names one of a run's, which is merged into its base; `part` one of the models of a
    run that trains several."""
    loaded = load_model(path, adapter, part)
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
    """Exports a model that is already loaded, like `export_command`."""
    loaded.check()
    options: dict[str, Any] = {
        "dtype": dtype or stored_dtype(loaded.model, loaded.tensors),
        "facts": loaded.facts,
        "prefix": loaded.prefix,
        "overwrite": overwrite,
        "source": loaded.source,
    }
    write: Callable[..., Proof] = partial(write_gguf, end_ids=loaded.end_ids)
    if Path(out).suffix == ".gguf":
        if max_shard_bytes is not None:
            raise UserError("max_shard_bytes: a GGUF file is one file; leave it out")
    else:
        write = partial(write_hf, suffix=loaded.suffix, generation=loaded.generation)
        options["max_shard_bytes"] = MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
    with sending(out, overwrite=overwrite) as local:
        proof = write(
            loaded.model, loaded.tensors, loaded.load, loaded.tokenizer_dir, local, **options
        )
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
    if is_run(path):
        raise UserError(f"{path}: is a run directory; write its model with lmwright export")
    loaded = load_model(path).changed(overrides)
    return export_loaded(loaded, out, dtype=dtype, overwrite=overwrite)


def import_maxtext_command(
    path: str | Path,
    out: str | Path,
    model: str,
    overrides: Sequence[str] = (),
    *,
    tokenizer: str | None = None,
    tied_logits: TiedLogits | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Proof:
    """Writes a checkpoint of MaxText as `import_command` does. `model` names what was trained: a
    preset, a run file, a model folder or hub name, with `overrides` of its fields; `tokenizer` is
    a tokenizer's path or hub name."""
    found = find_model(model, overrides)
    tensors = MaxTextTensors(path, found, tied_logits)
    with temporary_folder() as folder:
        if tokenizer is not None:
            save_tokenizer(import_tokenizer(tokenizer), folder)
        loaded = LoadedModel(
            found,
            tensors,
            Path(folder) if tokenizer is not None else None,
            Facts(name=Path(out).absolute().name, origin="Imported from a checkpoint of MaxText."),
            Path(path),
        )
        return export_loaded(loaded, out, dtype=dtype, overwrite=overwrite)


def _say(loaded: LoadedModel, out: str | Path, proof: Proof) -> None:
    print(f"{out}: {count_params(loaded.model.spec()):,} parameters in {proof.dtype}")
    for line in proof.lines():
        print(f"  {line}")
    if loaded.tokenizer_dir is None:
        print("  no tokenizer: none came with the model")
