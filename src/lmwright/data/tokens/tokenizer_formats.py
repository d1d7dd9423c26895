"""Tokenizers of other formats: GPT-2's and BERT's files, tokenizer.json, sentencepiece, .tiktoken.

Each becomes a `tokenizers.Tokenizer` with the same ids, so that everything can be saved in
one layout. A sentencepiece model is converted exactly or refused: the result is compared with
the sentencepiece library itself on a probe text.
"""

import base64
import binascii
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lmwright.data.tokens.added import with_added
from lmwright.data.tokens.bert_vocab import FILE as VOCAB_TXT
from lmwright.data.tokens.bert_vocab import import_bert, is_bert
from lmwright.data.tokens.bpe import GPT2_SPLIT, O200K_SPLIT, QWEN_SPLIT, byte_vocab
from lmwright.data.tokens.hub_tokenizer import local_tokenizer
from lmwright.data.tokens.probe import BLANKS, PROBE
from lmwright.data.tokens.tokenizer import (
    SPLIT,
    TextTokenizer,
    add_special,
    begin_with,
    chat_template_of,
    find_roles,
    is_proto,
    load_tokenizer,
    read_backend,
    read_json,
    save_tokenizer,
    split_bytes,
)
from lmwright.errors import UserError
from lmwright.guard.folders import copy_folder
from lmwright.guard.temporary import temporary_folder
from lmwright.storage.mirror import refuse_url

ACCEPTED = (
    "tokenizer.json, a folder with it, a folder with vocab.json and merges.txt, BERT's vocab.txt, "
    "a sentencepiece .model, a .tiktoken or a .gguf file"
)


@dataclass(frozen=True)
class Family:
    """Parts that a .tiktoken file lacks: pre-tokenizer, special tokens (id order), roles."""

    split: str
    special: dict[str, int]
    eos: str
    bos: str | None = None
    pad: str | None = None
    prefixed: bool = False
    """transformers puts bos before a text."""
    nfc: bool = False


MOST_SPECIAL = 100_000  # ids beyond the ranks: a gap is filled with unused tokens


def _after(first: int, names: Iterable[str]) -> dict[str, int]:
    return {name: first + i for i, name in enumerate(names)}


def _reserve_names(first: int, stop: int) -> list[str]:
    return [f"<|reserved_special_token_{i}|>" for i in range(first, stop)]


# By number of ranks. Llama 3 counts its reserved tokens around the named ones.
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *_reserve_names(0, 4),
    "<|start_header_id|>",
    "<|end_header_id|>",
    *_reserve_names(4, 5),
    "<|eot_id|>",
    *_reserve_names(5, 251),
]
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
    f"<|extra_{i}|>" for i in range(205)
]
FIM = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
END = "<|endoftext|>"
FAMILIES = {
    128000: Family(
        SPLIT,
        _after(128000, LLAMA3_SPECIAL),
        eos="<|end_of_text|>",
        bos="<|begin_of_text|>",
        prefixed=True,
    ),
    151643: Family(QWEN_SPLIT, _after(151643, QWEN_SPECIAL), END, pad=END, nfc=True),
    50256: Family(GPT2_SPLIT, {END: 50256}, END, END),
    50280: Family(GPT2_SPLIT, {END: 50256}, END, END),
    100256: Family(SPLIT, {**_after(100257, [END, *FIM]), "<|endofprompt|>": 100276}, END),
    199998: Family(O200K_SPLIT, {END: 199999, "<|endofprompt|>": 200018}, END),
}


def import_tokenizer(path: str | os.PathLike) -> TextTokenizer:
    """Reads a tokenizer in any accepted format, or by its hub name. Raises UserError describing
    what is wrong with a file.

    A .tiktoken file of no known family needs `<file>.json` beside it:
    {"pattern": "...", "special_tokens": {"<|end|>": 5000}, "eos_token": "<|end|>"}.
    """
    path, _ = local_tokenizer(path)
    if path.is_dir():
        return with_added(_import_folder(path), path)
    if not path.is_file():
        raise UserError(f"tokenizer.path: {path} does not exist; give {ACCEPTED}")
    if path.suffix == ".gguf":
        from lmwright.data.tokens.gguf_tokenizer import read_tokenizer

        return read_tokenizer(path)
    if path.suffix == ".tiktoken" or path.name.endswith(".tiktoken"):
        return import_tiktoken(path)
    if path.suffix == ".model":
        # Llama 3 ships its ranks as tokenizer.model: base64 lines, no protobuf
        return import_sentencepiece(path) if is_proto(path) else import_tiktoken(path)
    if path.name in ("vocab.json", "encoder.json", "merges.txt", "vocab.bpe"):
        return import_gpt2(path.parent)
    if path.name == VOCAB_TXT:
        return with_added(import_bert(path.parent), path.parent)
    if path.suffix == ".json":
        beside = (path.parent / "tokenizer_config.json").is_file()
        if path.name == "tokenizer.json" and beside:
            return with_added(load_tokenizer(path.parent), path.parent)
        backend = read_backend(path)
        return TextTokenizer(backend, **find_roles(backend))
    raise UserError(f"tokenizer.path: {path} is not a known kind of tokenizer; give {ACCEPTED}")


def _import_folder(folder: Path) -> TextTokenizer:
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    if (folder / "vocab.json").is_file() or (folder / "encoder.json").is_file():
        return import_gpt2(folder)
    if is_bert(folder):
        return import_bert(folder)
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".model", ".tiktoken"))
    if len(paths) == 1:
        tokenizer = import_tokenizer(paths[0])
        config = read_json(folder / "tokenizer_config.json")
        roles = find_roles(tokenizer.backend, config) if config else {}
        return replace(
            tokenizer,
            **roles,
            chat_template=chat_template_of(folder, config) or tokenizer.chat_template,
        )
    what = "several tokenizers" if paths else "no tokenizer"
    raise UserError(f"tokenizer.path: {folder} holds {what}; give {ACCEPTED}")


def import_gpt2(folder: Path) -> TextTokenizer:
    """GPT-2's vocab.json and merges.txt (or encoder.json and vocab.bpe)."""
    vocab, merges = (
        next((folder / n for n in names if (folder / n).is_file()), None)
        for names in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe"))
    )
    if vocab is None or merges is None:
        missing = "vocab.json" if vocab is None else "merges.txt"
        raise UserError(f"tokenizer.path: {folder} holds no {missing}; GPT-2 files come as a pair")
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as e:  # the library raises bare Exception
        raise UserError(f"{vocab} and {merges} do not belong together: {e}") from None
    config = read_json(folder / "tokenizer_config.json")
    spaced = bool(config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    roles = find_roles(backend, config)
    if set(roles) == {"eos"}:
        roles |= {"bos": roles["eos"], "pad": roles["eos"]}
    add_special(backend, roles.values())
    return TextTokenizer(backend, **roles, chat_template=chat_template_of(folder, config))


def import_tiktoken(path: Path) -> TextTokenizer:
    """Ranks in base64, one per line; pre-tokenizer and special tokens come from a sidecar or the
    family."""
    ranks = read_ranks(path)
    family = _sidecar(path, ranks) or FAMILIES.get(len(ranks))
    if family is None:
        raise UserError(
            f"{path} has {len(ranks)} ranks, not those of a known family; write {path.name}.json "
            'beside it: {"pattern": "...", "special_tokens": {"<|end|>": '
            f'{max(ranks.values()) + 1}}}, "eos_token": "<|end|>"}}'
        )
    vocab, merges = byte_vocab(ranks)
    # A piece that is a token as a whole is taken unmerged: so does tiktoken.
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    try:
        backend.pre_tokenizer = split_bytes(family.split)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path.name}.json: pattern: {error}; correct it") from None
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _add_at(backend, family.special, path)
    if family.prefixed:
        begin_with(backend, [family.bos])
    return TextTokenizer(backend, eos=family.eos, bos=family.bos, pad=family.pad)


def _sidecar(path: Path, ranks: dict[bytes, int]) -> Family | None:
    beside = path.with_name(path.name + ".json")
    body = read_json(beside)
    if not body:
        return None
    special = body.get("special_tokens")
    if not isinstance(body.get("pattern"), str) or not isinstance(special, dict):
        raise UserError(f'{beside} needs "pattern" (text) and "special_tokens" (token to id)')
    taken = set(ranks.values())
    for token, i in special.items():
        if type(i) is not int or i in taken or not 0 <= i < len(ranks) + MOST_SPECIAL:
            raise UserError(f"{beside}: special_tokens: {token!r} needs an id of its own, not {i}")
        taken.add(i)
    for role in ("eos_token", "bos_token", "pad_token"):
        if body.get(role) is not None and body[role] not in list(special):
            raise UserError(f"{beside}: {role} {body[role]!r} is not in special_tokens")
    roles = {r: body.get(f"{r}_token") for r in ("eos", "bos", "pad")}
    return Family(body["pattern"], special, **roles, nfc=body.get("normalizer") == "nfc")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank. Raises UserError naming a wrong line."""
    ranks: dict[bytes, int] = {}
    with path.open("rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise UserError(f"{path}:{number} is not `base64 rank`; is it truncated?") from None
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise UserError(f"{path} lacks {len(missing)} of the 256 single bytes; is it truncated?")
    return ranks


def _add_at(backend: tokenizers.Tokenizer, special: dict[str, int], path: Path) -> None:
    """Adds special tokens under exactly these ids; gaps are filled with unused tokens."""
    by_id = {i: token for token, i in special.items()}
    taken = set(backend.get_vocab().values())
    names = {i: by_id.get(i, f"<|unused_{i}|>") for i in range(max(by_id) + 1) if i not in taken}
    add_special(backend, names.values())
    for i, token in by_id.items():
        if backend.token_to_id(token) != i:
            raise UserError(f"{path}: special token {token!r} cannot have the id {i}")


def import_sentencepiece(path: Path) -> TextTokenizer:
    """A sentencepiece tokenizer.model, BPE or Unigram."""
    from lmwright.data.tokens.sentencepiece_model import convert

    raw = path.read_bytes()
    for longest_blanks in (False, True):
        backend, processor, roles = convert(raw, str(path), longest_blanks=longest_blanks)
        tokenizer = TextTokenizer(backend, **roles, sentencepiece=raw)
        probe = (*PROBE, *BLANKS) if longest_blanks else PROBE
        different = [t for t in probe if processor.encode(t) != tokenizer.encode(t)]
        if not different:
            return tokenizer
    cure = "use a tokenizer.json of the same model"
    if processor.normalize("\uff21").endswith("A"):  # a map, which `tokenizers` reads otherwise
        cure += (
            ", or take the map of characters out of it and set data.normalize.unicode "
            "(docs/tokenizer.md, Sentencepiece models of your own)"
        )
    raise UserError(
        f"{path} cannot be converted to tokenizer.json with the same ids ({len(different)} of "
        f"{len(probe)} probe texts differ, such as {different[0][:40]!r}); {cure}"
    )


WRITTEN = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
}  # fmt: skip


def import_command(path: str | os.PathLike, out: str | os.PathLike) -> TextTokenizer:
    """Reads a tokenizer and writes it to the folder `out`. Raises UserError where something else
    lies there, or it cannot be written."""
    refuse_url(out)
    tokenizer, folder = import_tokenizer(path), Path(out)
    if not folder.exists() and _made_whole(tokenizer, folder):
        return tokenizer
    try:
        names = [each.name for each in sorted(folder.iterdir())] if folder.is_dir() else []
        other = next((n for n in names if n not in WRITTEN and not n.startswith(".")), None)
        if other is not None:
            raise UserError(f"{out}: holds {other}, too; choose a new folder")
        if "tokenizer.json" in names and _identity(load_tokenizer(folder)) != _identity(tokenizer):
            raise UserError(f"{out}: holds another tokenizer; remove it, or choose a new folder")
        save_tokenizer(tokenizer, folder)  # empty, or with the same tokenizer or a part of one
    except OSError as error:
        raise _unwritten(folder, error) from None
    return tokenizer


def _made_whole(tokenizer: TextTokenizer, out: Path) -> bool:
    """Makes a new folder, whole; False where another command made it meanwhile."""
    with temporary_folder() as whole:  # whose own disk may be the full one
        save_tokenizer(tokenizer, whole)
        try:
            copy_folder(Path(whole), out)
        except FileExistsError:
            return False
        except OSError as error:
            raise _unwritten(out, error) from None
    return True


def _unwritten(out: Path, error: OSError) -> UserError:
    return UserError(f"{out}: cannot be written ({error.strerror}); choose another folder")


def _identity(tokenizer: TextTokenizer) -> tuple[str, str | None]:
    return tokenizer.fingerprint, tokenizer.chat_template
