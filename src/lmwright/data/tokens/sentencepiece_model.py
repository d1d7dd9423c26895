"""Sentencepiece models as `tokenizers` objects with the same ids (BPE and Unigram).

Sentencepiece sees a text as one string in which U+2581 stands for a space; control pieces
never match text, whatever it says. https://arxiv.org/abs/1808.06226
"""

from typing import Any

import sentencepiece
import tokenizers
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lmwright.data.tokens.tokenizer import ROLES, begin_with
from lmwright.errors import UserError

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def convert(
    raw: bytes, name: str, *, longest_blanks: bool = False
) -> tuple[tokenizers.Tokenizer, sentencepiece.SentencePieceProcessor, dict[str, str]]:
    """Backend, the library's own processor, and the pieces for eos, bos, pad and unk.

    longest_blanks: of pieces of blanks only that have one score, the longest are merged first.
    Raises UserError, naming `name`, for a file that is cut or a kind that is not supported.
    """
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(raw)
        processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
    except (DecodeError, RuntimeError) as e:
        raise UserError(f"{name} is not a sentencepiece model, or is truncated: {e}") from None
    kind = proto.trainer_spec.model_type
    if kind not in (UNIGRAM, BPE):
        raise UserError(f"{name}: only BPE and Unigram sentencepiece models are supported")
    if proto.normalizer_spec.HasField("escape_whitespaces") and not (
        proto.normalizer_spec.escape_whitespaces
    ):
        raise UserError(f"{name}: models without escaped spaces are not supported")
    if kind == BPE:
        model = _bpe(proto, longest_blanks)
    else:
        pieces = [(p.piece, p.score) for p in proto.pieces]
        fallback = proto.trainer_spec.byte_fallback
        model = models.Unigram(pieces, unk_id=_unknown(proto), byte_fallback=fallback)
    backend = tokenizers.Tokenizer(model)
    _normalize(backend, proto, keeps_lines="\n" in processor.normalize("a\nb"))
    backend.decoder = _decoder(proto)
    for piece in proto.pieces:
        if piece.type in (UNKNOWN, CONTROL, USER_DEFINED):
            token = tokenizers.AddedToken(
                piece.piece, special=piece.type != USER_DEFINED, normalized=False
            )
            backend.add_tokens([token])
    ids = {role: getattr(processor, f"{role}_id")() for role in ROLES if role != "mask"}
    roles = {role: proto.pieces[i].piece for role, i in ids.items() if i >= 0}
    if kind == BPE and "bos" in roles:  # as Llama 2 is used
        begin_with(backend, [roles["bos"]])
    return backend, processor, roles


def _bpe(proto: Any, longest_blanks: bool) -> models.BPE:
    """Merges in the order of their scores.

    Of equal scores sentencepiece merges the leftmost pair, `tokenizers` the first of the list.
    Where only blanks have one score (Mistral), the two agree if longer pieces come first: a run
    of blanks then grows from its left, too, before a second pair of single blanks is merged.
    """
    vocab = {p.piece: i for i, p in enumerate(proto.pieces)}
    # Control pieces take no part in merging; else "<" + "s>" would make the token <s>.
    scores = {p.piece: p.score for p in proto.pieces if p.type == NORMAL}
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                blanks = longest_blanks and not piece.strip(SPACE)
                tie = -len(piece) if blanks else 0
                merges.append((-score, tie, vocab[left], vocab[right], left, right))
    merges.sort()
    return models.BPE(
        vocab,
        [m[4:] for m in merges],
        unk_token=proto.pieces[_unknown(proto)].piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _unknown(proto: Any) -> int:
    return next(i for i, p in enumerate(proto.pieces) if p.type == UNKNOWN)


def _normalize(backend: tokenizers.Tokenizer, proto: Any, keeps_lines: bool) -> None:
    """Character map, whitespace as the model expects it, a leading space, U+2581 for each space."""
    spec = proto.normalizer_spec
    steps = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # The first is exact. Maps that make a space of a line's end keep the other (`^` and `$`
        # stand at every line), and with it the fingerprint that their tokenizers always had.
        ends, inside = (
            (rf"\A +|[ {SPACE}]+\z", " {2,}")
            if keeps_lines
            else (f"^[ {SPACE}]+|[ {SPACE}]+$", f"[ {SPACE}]{{2,}}")
        )
        steps.append(normalizers.Replace(tokenizers.Regex(ends), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(inside), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    if proto.trainer_spec.model_type == UNIGRAM:
        _cut(backend, proto)


def _cut(backend: tokenizers.Tokenizer, proto: Any) -> None:
    """Cuts of a text before Unigram reads it. One before each space changes nothing where no piece
    reaches over it. One behind the `<` of `<0x0A>` keeps the text from being read as the byte."""
    normal, cuts = [p.piece for p in proto.pieces if p.type == NORMAL], []
    if not any(SPACE in piece[1:] for piece in normal):
        cuts.append(pre_tokenizers.Split(SPACE, behavior="merged_with_next"))
    if proto.trainer_spec.byte_fallback and not any("<0" in piece for piece in normal):
        byte = tokenizers.Regex(r"<(?=0x[0-9A-F]{2}>)")
        cuts.append(pre_tokenizers.Split(byte, behavior="merged_with_previous"))
    if cuts:
        backend.pre_tokenizer = cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)


def _decoder(proto: Any) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " ")]
    if proto.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)
