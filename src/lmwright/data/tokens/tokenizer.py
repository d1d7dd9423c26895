"""Tokenizer: one class over the `tokenizers` library, trained here or imported, saved as HF does.

    texts --train_tokenizer--\\
                              TextTokenizer --save_tokenizer--> tokenizer.json + config
    file --import_tokenizer--/                                  (AutoTokenizer loads it)

Special tokens found in text are ordinary text unless a caller asks for them to be parsed, so
that no document can forge the end of a document.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lmwright.config import run
from lmwright.config.check_data import EARLIER_VOCAB_SIZE
from lmwright.data.json_text import parse_json, write_json
from lmwright.data.tokens.ends import ends_of
from lmwright.errors import UserError
from lmwright.guard.files import write_whole

ROLES = ("eos", "bos", "pad", "unk", "mask")

# The split of Llama 3: llama.cpp knows it by name, so a trained tokenizer can become GGUF.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Converts text to ids and back. `backend` holds tokenizer.json; roles are token strings."""

    backend: tokenizers.Tokenizer
    eos: str | None = None
    bos: str | None = None
    pad: str | None = None
    unk: str | None = None
    mask: str | None = None
    chat_template: str | None = None
    """Jinja source."""
    sentencepiece: bytes | None = None
    """The sentencepiece model it was imported from."""

    @functools.cached_property
    def spec(self) -> dict[str, Any]:
        """tokenizer.json as an object, without padding and truncation."""
        spec = json.loads(self.backend.to_str())
        return spec | {"padding": None, "truncation": None}

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the canonical tokenizer.json: equal if and only if ids are."""
        canonical = json.dumps(self.spec, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the greatest id."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def eos_id(self) -> int | None:
        """Id that ends a document; None if the tokenizer has none."""
        return self._id(self.eos)

    @property
    def bos_id(self) -> int | None:
        """Id that begins a document; None if the tokenizer has none."""
        return self._id(self.bos)

    @property
    def pad_id(self) -> int | None:
        """Id that fills rows; None if the tokenizer has none."""
        return self._id(self.pad)

    @property
    def mask_id(self) -> int | None:
        """Id that hides a token from an encoder; None if the tokenizer has none."""
        return self._id(self.mask)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: i for i, token in sorted(added.items()) if token.special}

    @functools.cached_property
    def plain(self) -> tokenizers.Tokenizer:
        """Backend for data: a special token in the text is encoded as plain text."""
        plain = self._copy()
        if isinstance(self.backend.model, models.Unigram):
            # Its search knows every string of the vocabulary, so the special ones get others. They
            # stay in the list of added tokens, whose ids are counted on from the vocabulary.
            spec = json.loads(plain.to_str())
            for token in (each for each in spec["added_tokens"] if each["special"]):
                token["content"] = other = f"\0special\0{token['id']}"
                if token["id"] < len(spec["model"]["vocab"]):
                    spec["model"]["vocab"][token["id"]][0] = other
            spec["post_processor"] = None
            plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of a text without additions; `parse_special` turns special strings into their ids."""
        backend = self.unpadded if parse_special else self.plain
        return backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode`."""
        encodings = self.plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids uint32 [tokens] of a text whose special strings are parsed, and the characters
        start..stop-1 that each stands for, int64 [tokens, 2]."""
        encoding = self.unpadded.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(
            -1, 2
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ids; broken UTF-8 becomes U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def _copy(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        return copy

    @functools.cached_property
    def unpadded(self) -> tokenizers.Tokenizer:
        """Backend without the padding and truncation that its file may ask for."""
        return self._copy()

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def _with_roles(backend: tokenizers.Tokenizer, spec: run.Tokenizer) -> TextTokenizer:
    """A trained tokenizer, whose first special token ends, begins and pads."""
    first = spec.special_tokens[0]
    mask = next((token for token in CUSTOM["mask"] if token in spec.special_tokens), None)
    roles = {"eos": first, "bos": first, "pad": first, "mask": mask}
    return TextTokenizer(backend, **roles, chat_template=spec.chat_template)


def stand_in(spec: run.Tokenizer) -> TextTokenizer:
    """Placeholder with the special tokens and template of a tokenizer that is still to be
    trained."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.add_special_tokens(list(spec.special_tokens))
    return _with_roles(backend, spec)


def train_tokenizer(texts: Iterable[str], spec: run.Tokenizer) -> TextTokenizer:
    """Trains a byte-level BPE or Unigram tokenizer; the same texts give the same tokenizer.

    Every byte is in the vocabulary, so that any text comes back unchanged. The special tokens
    take the last ids; the first of them is eos, bos and pad. A small text may give fewer than
    `spec.vocab_size` tokens (8192 if unset). Raises UserError for a vocabulary that cannot hold
    the bytes.
    """
    size = spec.vocab_size or EARLIER_VOCAB_SIZE
    ordinary = size - len(spec.special_tokens)
    if not spec.special_tokens:
        raise UserError(
            "data.tokenizer.special_tokens is empty; name at least the token that ends a document, "
            'such as "<|endoftext|>"'
        )
    if ordinary < 256:
        raise UserError(
            f"data.tokenizer.vocab_size: {size} is too small; 256 bytes and "
            f"{len(spec.special_tokens)} special tokens need {256 + len(spec.special_tokens)}"
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": ordinary, "initial_alphabet": alphabet, "show_progress": False}
    if spec.train == "bpe":
        backend = tokenizers.Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(**options)
    else:
        backend = tokenizers.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**options)
    backend.pre_tokenizer = split_bytes(SPLIT)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(_some_text(texts), trainer)
    if spec.train == "unigram":
        backend = _canonical_unigram(backend)
    for token in spec.special_tokens:
        if backend.token_to_id(token) is not None:
            raise UserError(
                f"tokenizer.special_tokens: {token!r} is also an ordinary token of this text; "
                f"choose a string that does not occur in text, such as '<|{token.strip('<|>')}|>'"
            )
    add_special(backend, spec.special_tokens)
    return _with_roles(backend, spec)


def split_bytes(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Pre-tokenizer of a byte-level model whose pieces are those of a regular expression, or of
    several after each other."""
    splits = [pre_tokenizers.Split(tokenizers.Regex(p), behavior="isolated") for p in patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, as_bytes])


def add_special(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Adds special tokens under the next ids, or marks those that are there as special."""
    backend.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(tokens)]
    )


def begin_with(backend: Any, tokens: Sequence[str], after: Sequence[str] = ()) -> None:
    """Makes the backend put special tokens before each text, and others after it."""
    single = [*tokens, "$A", *after]
    second = ["$B:1" if piece == "$A" else f"{piece}:1" for piece in single]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *second],
        special_tokens=[(t, backend.token_to_id(t)) for t in dict.fromkeys((*tokens, *after))],
    )  # fmt: skip


def _some_text(texts: Iterable[str]) -> Iterable[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise UserError("The tokenizer cannot be trained: data.sources hold no training text")


def _canonical_unigram(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Unigram model with the same pieces without the noise of the trainer, whose sums run in hash
    order.

    Scores agree between runs to the last bits only, and single bytes that never won get a
    small distinct score in an arbitrary order: both are settled here.
    """
    spec = json.loads(backend.to_str())
    pieces = [(piece, round(score, 6)) for piece, score in spec["model"]["vocab"]]
    longer = [(p, s) for p, s in pieces if len(p) > 1]
    single = sorted((p, s) for p, s in pieces if len(p) == 1)
    lowest = min(s for _, s in pieces)
    # The trainer spaces the unused bytes by 1e-4 above the lowest score.
    unused = {p for p, s in single if s < lowest + 0.03}
    single = [(p, round(lowest, 2) if p in unused else s) for p, s in single]
    ordered = sorted(longer + single, key=lambda e: (-e[1], e[0]))
    spec["model"]["vocab"] = [list(e) for e in ordered]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def save_tokenizer(tokenizer: TextTokenizer, folder: str | os.PathLike) -> None:
    """Writes the Hugging Face layout, each file atomically, tokenizer.json last.

    tokenizer.json, tokenizer_config.json, special_tokens_map.json, and tokenizer.model if it
    was imported from sentencepiece. `transformers.AutoTokenizer` loads the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    roles = {f"{r}_token": getattr(tokenizer, r) for r in ROLES if getattr(tokenizer, r)}
    if tokenizer.mask:  # an encoder's
        roles |= ends_of(tokenizer.unpadded)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= roles
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    write_json(folder / "special_tokens_map.json", roles, ascii_only=False)
    write_json(folder / "tokenizer_config.json", config, ascii_only=False)
    if tokenizer.sentencepiece:  # opened without tokenizer.json, it has the template of the config
        write_whole(folder / "tokenizer.model", tokenizer.sentencepiece)
    else:
        (folder / "tokenizer.model").unlink(missing_ok=True)
    write_json(folder / "tokenizer.json", tokenizer.spec, ascii_only=False)


def load_tokenizer(folder: str | os.PathLike) -> TextTokenizer:
    """Loads a folder with tokenizer.json and, if present, its roles and chat template.

    Raises UserError for a missing or broken file.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no tokenizer.json; name a tokenizer's folder or file")
    backend = read_backend(path)
    config = read_json(folder / "tokenizer_config.json")
    roles = read_json(folder / "special_tokens_map.json") | config
    model = folder / "tokenizer.model"
    return TextTokenizer(
        backend,
        **find_roles(backend, roles),
        chat_template=chat_template_of(folder, config),
        sentencepiece=model.read_bytes() if model.is_file() and is_proto(model) else None,
    )


def chat_template_of(folder: Path, config: dict[str, Any]) -> str | None:
    """Template stored beside a tokenizer or in its tokenizer_config.json; the default one of
    several. Raises UserError if it is not text."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{jinja} is not UTF-8; download it again") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict)]
        template = next(
            (each.get("template") for each in named if each.get("name") == "default"), None
        )
    if not isinstance(template, str | None):
        raise UserError(f"{folder}: chat_template is {template!r:.60}, not the text of a template")
    return template


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Tokenizer of a tokenizer.json. Raises UserError if the file is not one."""
    try:
        return call_guarded(tokenizers.Tokenizer.from_str, path.read_text("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; it should be a tokenizer.json") from None
    except Exception as e:  # the library raises bare Exception
        raise UserError(f"{path} is not a readable tokenizer.json: {e}") from None


def call_guarded(make: Callable[..., Any], *args: Any) -> Any:
    """Calls `make`; a panic in the library, which no `except Exception` catches, becomes a
    ValueError."""
    try:
        return make(*args)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library cannot read it ({error!s:.200})") from None


# Tokens that play a role by custom when nothing says so, the more telling first.
CUSTOM = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]"),
    "pad": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<|mdm_mask|>", "<|mask|>", "<mask>", "[MASK]"),
}
BERT = {"eos": "sep_token", "bos": "cls_token"}  # which encoders name in their place


def find_roles(
    backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None
) -> dict[str, str]:
    """Tokens for eos, bos, pad, unk and mask: as `config` sets them, else by customary names."""
    config, roles = config or {}, {}
    silent = not any(f"{role}_token" in config for role in CUSTOM)
    for role, names in CUSTOM.items():
        token = config.get(f"{role}_token") or config.get(BERT.get(role, ""))
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise UserError(f"the tokenizer's {role}_token is {token!r:.60}, not a token's text")
        unsaid = silent or (role == "mask" and "mask_token" not in config)  # added to a decoder's
        for name in names if unsaid else [token] if token else []:
            if backend.token_to_id(name) is not None:
                roles[role] = name
                break
    return roles


def read_json(path: Path) -> dict[str, Any]:
    """Object in a JSON file, {} if the file is missing. Raises UserError if it is not an object."""
    try:
        value = parse_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object")
    return value


def is_proto(path: Path) -> bool:
    """True for a sentencepiece model, which begins with its first piece; .tiktoken text is
    base64."""
    with path.open("rb") as f:
        return f.read(1) == b"\n"
