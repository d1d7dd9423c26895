"""The tokenizer in a GGUF file, to and from tokenizer.json.

GGUF names two kinds that are handled here: `gpt2` (byte-level BPE, whose split goes by a name that
llama.cpp knows) and `llama` (sentencepiece BPE: pieces and scores).
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lmwright.data.manifest import hash_pieces
from lmwright.data.text.chat_render import UnusableError
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.data.tokens.bpe import (
    DEEPSEEK_SPLITS,
    O200K_SPLIT,
    QWEN35_SPLIT,
    QWEN_SPLIT,
    merges_of,
)
from lmwright.data.tokens.gguf_header import GgufHeader
from lmwright.data.tokens.probe import PROBE
from lmwright.data.tokens.sentencepiece_model import SPACE, convert
from lmwright.data.tokens.tokenizer import SPLIT, TextTokenizer, begin_with, split_bytes
from lmwright.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PADDING = re.compile(r"\[PAD\d+\]")
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding",
         "mask": "mask"}  # fmt: skip
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
NAME = "general.name"
# A model called so takes spaces behind special tokens for a part of them in llama.cpp, but for 3
# tokens. It has to have these and </s>: llama.cpp does not load it otherwise.
PHI3 = re.compile("phi-?3", re.IGNORECASE)
UNSTRIPPED = {"<unk>", "<s>", "<|endoftext|>"}
PHI3_TOKENS = UNSTRIPPED | {"</s>"}


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


@dataclass(frozen=True)
class Pre:
    """Pre-tokenizer behind a name of llama.cpp: its split, and its implicit settings."""

    make: Callable[[], Any]
    names: tuple[str, ...]
    """Names of llama.cpp for it; the first is the one written."""
    ignore_merges: bool = False
    """True if a piece that is a token as a whole is taken unmerged."""
    bos: bool = False
    nfc: bool = False
    """True if the tokenizer.json of these models composes characters first."""


_gpt2 = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
_llama, _qwen, _qwen35, _gpt4o = (
    partial(split_bytes, split) for split in (SPLIT, QWEN_SPLIT, QWEN35_SPLIT, O200K_SPLIT)
)
PRES = (
    Pre(
        _llama, ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1"), ignore_merges=True,
        bos=True,
    ),
    Pre(_llama, ("smaug-bpe", "dbrx", "glm4", "chatglm-bpe")),
    Pre(partial(split_bytes, *DEEPSEEK_SPLITS), ("deepseek-v3", "hunyuan-dense")),
    Pre(_qwen, ("qwen2", "deepseek-r1-qwen"), nfc=True),
    Pre(_qwen, ("stablelm2", "hunyuan")),
    Pre(_qwen35, ("qwen35",), nfc=True),
    Pre(_gpt2, ("gpt-2", "phi-2", "jais")),
    Pre(_gpt2, ("olmo", "mpt"), nfc=True),  # that of GPT-NeoX
    Pre(_digits, ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")),
    Pre(_gpt4o, ("gpt-4o", "llama4")),
)  # fmt: skip


def holds_tokenizer(meta: Mapping[str, Any]) -> bool:
    """True if a file's metadata hold a tokenizer, of whichever kind."""
    return meta.get(MODEL) not in (None, "none", "no_vocab") and "tokenizer.ggml.tokens" in meta


def tokenizer_of(meta: Mapping[str, Any], where: str) -> TextTokenizer | None:
    """The tokenizer in a file's metadata; None where there is none. Raises UserError for a kind
    that cannot be rebuilt."""
    if not holds_tokenizer(meta):
        return None
    tokens = list(meta["tokenizer.ggml.tokens"])
    types = list(meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens))
    while tokens and types[-1] == UNUSED and PADDING.fullmatch(tokens[-1]):
        tokens.pop(), types.pop()  # rows of the embedding that stand for nothing
    if len(set(tokens)) != len(tokens) or len(types) < len(tokens):
        raise UserError(f"{where}: its tokenizer has two tokens of one name; download it again")
    ids = {role: meta.get(f"tokenizer.ggml.{name}_token_id") for role, name in ROLES.items()}
    roles = {role: tokens[i] for role, i in ids.items() if i is not None and i < len(tokens)}
    kind = str(meta[MODEL])
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind)
    if make is None:
        raise UserError(
            f"{where}: its tokenizer is of kind {kind!r}, which is not rebuilt here (gpt2 and "
            f"llama are); put the model's tokenizer.json into the same folder"
        )
    made = make(meta, tokens, types, roles, where)
    if PHI3.search(str(meta.get(NAME, ""))) and PHI3_TOKENS <= set(tokens):
        made = _stripping(made)
    return replace(made, **roles, chat_template=meta.get("tokenizer.chat_template"))


def read_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer in a GGUF file. Raises UserError where there is none, or one of a kind that
    cannot be rebuilt."""
    found = tokenizer_of(GgufHeader(path).meta, str(path))
    if found is None:
        raise UserError(f"{path}: holds no tokenizer; give the model's tokenizer.json")
    return found


def hash_of(path: Path) -> str:
    """Hash of what a GGUF file says about its tokenizer; the weights are not read."""
    meta = GgufHeader(path).meta
    said = {k: v for k, v in sorted(meta.items()) if k.startswith("tokenizer.") or k == NAME}
    return hash_pieces([json.dumps(said, default=str).encode()])


def _stripping(tokenizer: TextTokenizer) -> TextTokenizer:
    spec = tokenizer.spec
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] not in UNSTRIPPED
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return replace(tokenizer, backend=backend)


def name_of_model(name: str, tokenizer: TextTokenizer) -> str:
    """The name of a model in its file, which for llama.cpp says what special tokens strip."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    strips = {token.content for token in added if token.rstrip}
    if strips and strips == {token.content for token in added} - UNSTRIPPED:
        if tokenizer.backend.get_vocab(with_added_tokens=True).keys() >= PHI3_TOKENS:
            return name if PHI3.search(name) else f"{name} phi-3"
    return PHI3.sub("phi 3", name)


def _byte_level(
    meta: Mapping[str, Any], tokens: list[str], types: list[int], roles: dict[str, str], where: str
) -> TextTokenizer:
    name = meta.get(PRE, "default")
    pre = next((each for each in PRES if name in each.names), None)
    if pre is None:
        known = ", ".join(each.names[0] for each in PRES)
        raise UserError(
            f"{where}: its tokenizer splits text the way {name!r} does, which is not known here "
            f"(these are: {known}); put the model's tokenizer.json into the same folder"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges") or ()]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: its merges do not fit its tokens: {reason:.200}") from None
    backend.pre_tokenizer, backend.decoder = pre.make(), decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            added = tokenizers.AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            backend.add_tokens([added])
    if meta.get("tokenizer.ggml.add_bos_token", pre.bos) and "bos" in roles:
        begin_with(backend, [roles["bos"]])
    return TextTokenizer(backend)


def _sentencepiece(
    meta: Mapping[str, Any], tokens: list[str], types: list[int], roles: dict[str, str], where: str
) -> TextTokenizer:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    scores = meta.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    for token, score, kind in zip(tokens, scores, types, strict=False):
        proto.pieces.add(piece=token, score=float(score), type=kind)
    spec, normal = proto.trainer_spec, proto.normalizer_spec
    spec.model_type, spec.byte_fallback = 2, BYTE in types
    if UNKNOWN not in types:
        raise UserError(f"{where}: its sentencepiece tokenizer has no unknown token")
    spec.unk_piece = tokens[types.index(UNKNOWN)]
    for role in ("bos", "eos", "pad"):
        setattr(spec, f"{role}_piece", roles.get(role, ""))
    normal.add_dummy_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    normal.remove_extra_whitespaces = bool(meta.get("tokenizer.ggml.remove_extra_whitespaces"))
    normal.escape_whitespaces, normal.name = True, "identity"
    raw = proto.SerializeToString()
    backend, processor, _ = convert(raw, where)
    made = TextTokenizer(backend, sentencepiece=raw)
    # behind a token that is matched in any text, llama.cpp puts a space as tokenizers do
    matched = [token for token, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    probe = [text for text in PROBE if not any(token in text for token in matched)]
    if any(processor.encode(text) != made.encode(text) for text in probe):
        raise UserError(
            f"{where}: its tokenizer cannot be rebuilt with the same ids; put the model's "
            f"tokenizer.json into the same folder"
        )
    backend.post_processor = processors.ByteLevel(trim_offsets=False)  # adds nothing
    if meta.get("tokenizer.ggml.add_bos_token", True) and "bos" in roles:
        begin_with(backend, [roles["bos"]])
    return made


def metadata_of_tokenizer(
    tokenizer: TextTokenizer, vocab_size: int, begins_with_bos: bool, where: str
) -> dict[str, Any]:
    """Metadata for a tokenizer; rows of the embedding beyond it become unused tokens. Raises
    UserError for one that llama.cpp could not follow."""
    spec = tokenizer.spec
    if spec["model"]["type"] != "BPE":
        raise UserError(f"{where}: GGUF takes BPE tokenizers, this one is {spec['model']['type']}")
    added = tokenizer.backend.get_added_tokens_decoder()
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        tokens[i] = token
        types[i] = NORMAL
        if i in added:
            types[i] = CONTROL if added[i].special else USER_DEFINED
        elif spec["model"].get("byte_fallback") and BYTE_PIECE.fullmatch(token):
            types[i] = BYTE
    merges = merges_of(spec["model"])
    meta: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if (spec["decoder"] or {}).get("type") == "ByteLevel":
        meta |= {"model": "gpt2", "pre": _name_of_split(tokenizer, where)}
        meta["merges"] = [" ".join(merge) for merge in merges]
    else:
        if tokenizer.unk is not None:
            types[tokenizer.backend.token_to_id(tokenizer.unk)] = UNKNOWN
        if tokenizer.sentencepiece is not None:
            scores = _own_scores(tokenizer.sentencepiece, vocab_size)
        else:
            scores = _scores(tokens, types, merges, where)
        meta |= {"model": "llama", "scores": scores}
        meta["add_space_prefix"] = tokenizer.unpadded.encode(
            "a", add_special_tokens=False
        ).tokens[0].startswith(SPACE)  # fmt: skip
    for role, name in ROLES.items():
        token = getattr(tokenizer, role)
        if token is not None:
            meta[f"{name}_token_id"] = tokenizer.backend.token_to_id(token)
    meta["add_bos_token"] = begins_with_bos
    meta = {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
    if tokenizer.chat_template:
        meta["tokenizer.chat_template"] = tokenizer.chat_template
    back = tokenizer_of(meta | {NAME: name_of_model("", tokenizer)}, where)
    if any(back.encode(text) != tokenizer.encode(text) for text in PROBE):
        raise UserError(
            f"{where}: llama.cpp would cut text otherwise than this tokenizer does; export to a "
            f"Hugging Face folder instead"
        )
    _refuse_normalized(tokenizer, back, where)
    text = _chat(tokenizer)
    if back.encode(text, parse_special=True) != tokenizer.encode(text, parse_special=True):
        raise UserError(
            f"{where}: special tokens in the chat template strip the spaces beside them, as "
            "llama.cpp's do for all tokens of Phi-3 alone; export to a Hugging Face folder instead"
        )
    return meta


def _refuse_normalized(tokenizer: TextTokenizer, back: TextTokenizer, where: str) -> None:
    """Raises UserError for an added token that is found in normalized text, where llama.cpp, which
    looks for it in the text as it is, gives other ids."""
    if tokenizer.backend.normalizer is None:
        return
    for token in tokenizer.backend.get_added_tokens_decoder().values():
        if token.special or not token.normalized:
            continue
        text = token.content
        texts = [text, f"a {text} b", f"a{text}b", f"{text} {text}"]
        if back.encode_batch(texts) != tokenizer.encode_batch(texts):
            raise UserError(
                f"{where}: its added token {text!r} is matched in normalized text, and llama.cpp "
                "matches it in the text as it is, which gives other ids; add it as a special "
                "token (lmwright vocab --special), or export to a Hugging Face folder instead"
            )


def _chat(tokenizer: TextTokenizer) -> str:
    """A conversation by the chat template, where tokens strip what is beside them; empty where
    none do, or the template writes none."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    if not tokenizer.chat_template or not any(t.lstrip or t.rstrip for t in added):
        return ""
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer).render({"messages": turns * 2})
    except (UnusableError, UserError):
        return ""


def _name_of_split(tokenizer: TextTokenizer, where: str) -> str:
    """The name under which llama.cpp knows how a tokenizer cuts text, found by trying."""
    spec, split = tokenizer.spec, tokenizer.backend.pre_tokenizer
    normalizer = (spec["normalizer"] or {}).get("type")
    ignores = bool(spec["model"].get("ignore_merges"))
    if split is not None and normalizer in (None, "NFC"):
        cut = [split.pre_tokenize_str(text) for text in PROBE]
        for pre in PRES:
            if pre.ignore_merges != ignores or (normalizer == "NFC") > pre.nfc:
                continue
            made = pre.make()
            if all(made.pre_tokenize_str(t) == c for t, c in zip(PROBE, cut, strict=True)):
                return pre.names[0]
    raise UserError(
        f"{where}: the tokenizer cuts text in a way for which llama.cpp has no name; export to a "
        f"Hugging Face folder instead"
    )


def _scores(
    tokens: list[str], types: list[int], merges: list[tuple[str, str]], where: str
) -> list[float]:
    """Scores with which sentencepiece's rule (join the pair whose piece scores best) makes the
    merges. Raises UserError where there are none."""
    ranks: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, []).append(rank)
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    listed = set(merges)
    for token in normal:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        if any(cut not in listed for cut in cuts if cut[0] in normal and cut[1] in normal):
            raise UserError(
                f"{where}: the merges of {token!r} are not those of a sentencepiece model, so "
                f"llama.cpp would cut text otherwise"
            )
    scores: dict[str, float] = {}
    score, last = 0.0, -1
    for token, mine in sorted(ranks.items(), key=lambda item: item[1][0]):
        # pieces whose merges are mixed had one score, and the leftmost pair went first
        score = score if mine[0] < last else score - 1.0
        scores[token], last = score, max(last, mine[-1])
    return [scores.get(token, 0.0) for token in tokens]


def _own_scores(raw: bytes, count: int) -> list[float]:
    """The scores of a sentencepiece model; tokens beyond it have none."""
    from sentencepiece import sentencepiece_model_pb2

    scores = [piece.score for piece in sentencepiece_model_pb2.ModelProto.FromString(raw).pieces]
    return scores + [0.0] * (count - len(scores))
