"""Parts: some weights of a run from another model, as `train.init_parts` names them; others are
fresh.

    train.init_parts = ["embed", "layers.mlp"] --> every weight whose dotted path begins so

Where the tokenizers differ, rows of the vocabulary go to the token of the same text; a token that
the other one does not have starts fresh. Texts are compared as bytes, whatever letters the
vocabularies write for a space; special tokens by name, and the ends of texts with each other.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lmwright.config.errors import nearest
from lmwright.core.param import Param, Tree, init_weights, nest, walk
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.bpe import byte_letters
from lmwright.data.tokens.token_bytes import BYTE, SPACE, is_byte_level
from lmwright.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from lmwright.errors import UserError
from lmwright.formats.hf_stream import on_devices
from lmwright.formats.open import Origin
from lmwright.formats.tokenizer_files import open_tokenizer
from lmwright.formats.weights import host_weights
from lmwright.program.plan import Plan

VOCAB = "vocab"


def weights_with_parts(
    plan: Plan, origin: Origin, store: TokenStore
) -> tuple[Tree, list[str], str]:
    """The plan's weights on its devices, names of those that are fresh as a whole, and a sentence
    on rows of the vocabulary. Raises UserError for parts that one side does not have, or whose
    shapes differ."""
    ours = dict(walk(plan.spec))
    taken, rows = parts_of(plan, origin, store)
    places = dict(walk(plan.shardings))
    fresh = jax.jit(partial(init_weights, plan.spec), out_shardings=plan.shardings)
    weights = dict(walk(fresh(jax.random.key(plan.run.seed))))
    arrays = dict(walk(host_weights(origin)))
    for path in taken:
        if rows is not None and VOCAB in ours[path].axes:
            axis = ours[path].axes.index(VOCAB)
            weights[path] = _with_rows(weights[path], arrays[path], rows, axis, places[path])
        else:
            weights[path] = on_devices(arrays[path], places[path])
    said = ""
    if rows is not None:
        said = f"{int((rows >= 0).sum()):,} of {len(rows):,} rows of the vocabulary by token"
    return nest(weights.items()), sorted(ours.keys() - taken), said


def parts_of(plan: Plan, origin: Origin, store: TokenStore) -> tuple[set[str], np.ndarray | None]:
    """Paths of the weights that are taken, and the rows of the vocabulary as `matched` gives them;
    no weights are read. Raises UserError as `weights_with_parts`."""
    ours, theirs = dict(walk(plan.spec)), dict(walk(origin.spec))
    taken = taken_paths(plan.run.train.init_parts, ours, theirs, str(origin.path))
    rows = _rows(plan, origin, store) if any(VOCAB in ours[path].axes for path in taken) else None
    for path in sorted(taken):
        _refuse_shape(path, ours[path], theirs[path], rows is not None, str(origin.path))
    return taken, rows


def taken_paths(
    parts: Sequence[str], ours: Mapping[str, Param], theirs: Mapping[str, Param], where: str
) -> set[str]:
    """Paths of the weights that the parts name. Raises UserError for a part that the run's model
    or the other one does not have."""
    taken: set[str] = set()
    for part in parts:
        for side, who in ((ours, "this run's model"), (theirs, where)):
            if not any(_within(path, part) for path in side):
                known = sorted({path.partition(".")[0] for path in side})
                raise UserError(f"{who} has no {part!r}; {_known(part, known)}")
        taken |= {path for path in ours if _within(path, part)}
    if missing := sorted(path for path in taken if path not in theirs):
        raise UserError(
            f"{where} has no {missing[0]}, which this run's model has; name the parts of "
            "it that both have"
        )
    return taken


def _known(part: str, names: Sequence[str]) -> str:
    return nearest(part, names, what="there are")


def _within(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")


def _refuse_shape(path: str, ours: Param, theirs: Param, by_token: bool, where: str) -> None:
    free = VOCAB if by_token else ""
    mine, other = (
        [size for axis, size in zip(p.axes, p.shape, strict=True) if axis != free]
        for p in (ours, theirs)
    )
    if mine != other:
        raise UserError(
            f"{path} is {tuple(theirs.shape)} in {where} and {tuple(ours.shape)} in this "
            f"run's model; give the model those sizes, or leave {path.partition('.')[0]!r} out"
        )


def _rows(plan: Plan, origin: Origin, store: TokenStore) -> np.ndarray | None:
    """The other model's id for the token of each id of the run's vocabulary, -1 where it has none;
    None where both have the same tokenizer and as many rows."""
    if origin.tokenizer_path is None:
        raise UserError(
            f"rows of the vocabulary are matched by token, and {origin.path} has no "
            "tokenizer; copy its tokenizer.json there"
        )
    theirs, ours = open_tokenizer(origin.tokenizer_path), load_tokenizer(store.tokenizer_dir)
    same_size = origin.model.vocab_size == plan.run.model.vocab_size
    if theirs.fingerprint == ours.fingerprint and same_size:
        return None
    return matched(ours, theirs, plan.run.model.vocab_size)


def matched(ours: TextTokenizer, theirs: TextTokenizer, rows: int) -> np.ndarray:
    """int [rows]: the id in `theirs` of each of `ours` ids, -1 where there is none."""
    found, known = np.full(rows, -1, np.int64), texts_of(theirs)
    for text, i in texts_of(ours).items():
        found[i] = known.get(text, -1)
    for mine, other in ((ours.eos_id, theirs.eos_id), (ours.bos_id, theirs.bos_id)):
        if mine is not None and other is not None and found[mine] < 0:
            found[mine] = other
    return found


def texts_of(tokenizer: TextTokenizer) -> dict[bytes | str, int]:
    """Bytes of each token to its id; of a special one its name."""
    special = {i: t.content for i, t in tokenizer.backend.get_added_tokens_decoder().items()}
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    by_letters, texts = is_byte_level(tokenizer), {}
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    for piece, i in sorted(vocab.items(), key=lambda item: item[0] not in BYTE):
        if i in special:
            texts[special[i]] = i
        elif by_letters:
            texts[bytes(letters[letter] for letter in piece)] = i
        elif piece in BYTE:  # first, so that a letter of its own comes before the byte
            texts[bytes([int(piece[3:5], 16)])] = i
        else:
            texts[piece.replace(SPACE, " ").encode()] = i
    return texts


def _with_rows(
    fresh: jax.Array, array: np.ndarray, rows: np.ndarray, axis: int, sharding: NamedSharding
) -> jax.Array:
    """A fresh weight with the other model's rows where there are any."""
    shape = tuple(len(rows) if i == axis else 1 for i in range(fresh.ndim))
    there = (rows >= 0).reshape(shape)
    picked = on_devices(np.take(array, np.maximum(rows, 0), axis), sharding)
    join = jax.jit(lambda new, old: jnp.where(there, old, new), out_shardings=sharding)
    return join(fresh, picked)
