"""Origin: where a run's first weights come from, besides chance.

run directory, checkpoint in it, HF folder, GGUF --> model, tokenizer     into the run file
                                                 --> weights              into the state
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from lmwright.checkpoint.store import load_run_weights
from lmwright.config.fields import to_plain
from lmwright.core.param import Tree, first_difference, walk
from lmwright.errors import UserError
from lmwright.formats.hf import load_model
from lmwright.formats.hf_read import model_from_config, read_config
from lmwright.formats.safetensors import refuse_pickles
from lmwright.formats.tokenizer_files import has_tokenizer


@dataclass(frozen=True)
class Origin:
    """A model at a place; weights are read by `weights`."""

    path: str | Path
    kind: str
    model: Any
    tokenizer_dir: Path | None
    step: int | None = None
    """Of a run's checkpoint; None takes the newest."""

    def refuse_unlike(self, spec: Tree) -> None:
        """UserError unless its weights have the names and shapes of `spec`."""
        shapes = ({name: p.shape for name, p in walk(tree)} for tree in (spec, self.model.spec()))
        if found := first_difference(*shapes):
            name, want, have = found
            raise UserError(
                f"{name} is {have} in {self.path} and {want} in this run's model; "
                "leave [model] out, or change only what no weight depends on"
            )

    def weights(self) -> Tree:
        """float32 host arrays. Raises UserError where they cannot be read."""
        if self.kind == "run directory":
            _, w = load_run_weights(self.path, self.step)
        else:
            w = load_model(self.path).weights
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), w)

    def placed(self, shardings: Tree) -> Tree:
        """float32 arrays on devices as `shardings` say; files are read tensor by tensor, so that
        no host holds them all."""
        if self.kind != "run directory":
            return load_model(self.path).load(dtype=jnp.float32, shardings=shardings)

        def put(leaf: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(put, self.weights(), shardings)


def weights_hash(w: Tree, rounded_to: Any = None) -> str:
    """Hash of all weights by their names, as float32 or first rounded to a dtype."""
    digest = xxhash.xxh3_128()
    for name, array in walk(w):
        add_to_hash(digest, name, array if rounded_to is None else array.astype(rounded_to))
    return digest.hexdigest()


def add_to_hash(digest: xxhash.xxh3_128, name: str, array: np.ndarray) -> None:
    """One weight more, as float32."""
    digest.update(name.encode())
    digest.update(np.ascontiguousarray(array, np.float32).data)


def look_at(path: str | Path) -> Origin:
    """What is at a path. Raises UserError if it is no model."""
    from lmwright.config.load import load_run

    if "://" in str(path):
        loaded = load_model(path)
        return Origin(path, "model of a hub", loaded.model, loaded.tokenizer_dir)
    path, step = Path(path).expanduser(), None
    if path.parent.name == "checkpoints" and path.name.isdigit():
        path, step = path.parent.parent, int(path.name)
    if (path / "run.toml").exists():
        tokenizer = path / "tokenizer"
        found = tokenizer if has_tokenizer(tokenizer) else None
        return Origin(path, "run directory", load_run(path / "run.toml").model, found, step)
    if (path / "config.json").exists():
        refuse_pickles(path)
        model = model_from_config(read_config(path), str(path / "config.json"))
        found = path if has_tokenizer(path) else None
        return Origin(path, "Hugging Face folder", model, found)
    loaded = load_model(path)
    # a GGUF's own tokenizer lies in a temporary folder: no run file can name it
    found = loaded.tokenizer_dir
    lasting = found if found is not None and found.is_relative_to(path.parent) else None
    return Origin(path, "GGUF file", loaded.model, lasting)


def run_fields(path: str, run_dir: Any = None) -> dict[tuple[str, ...], dict[str, Any]]:
    """{section: fields} of a run that starts from `path`: its model and its tokenizer's path.

    Where the path is gone, the run directory says what was there when the run began.
    """
    from lmwright.config.load import load_run

    dumped = Path(run_dir) / "run.toml" if isinstance(run_dir, str) else None
    if not Path(path).expanduser().exists() and dumped is not None and dumped.exists():
        run = load_run(dumped)
        model, tokenizer = run.model, run.data.tokenizer.path
    else:
        try:
            origin = look_at(path)
        except UserError as error:
            raise UserError(f"train.init_from: {error}") from error
        model, tokenizer = origin.model, origin.tokenizer_dir
    fields = {("model",): to_plain(model, defaults="omit")}
    if tokenizer is not None:
        fields["data", "tokenizer"] = {"path": str(tokenizer)}
    return fields
