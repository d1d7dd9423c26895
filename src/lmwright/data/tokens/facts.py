"""Facts of the tokenize stage: what later stages are told, and the fingerprint of all that its
output depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmwright.config import rows as row_kinds
from lmwright.config.run import Data, Tokenize
from lmwright.data.manifest import Manifest
from lmwright.data.text.chat_template import template_source
from lmwright.data.tokens.answers import AnswerColumn, Windows, windows_of
from lmwright.data.tokens.classes import Classes, Numbers
from lmwright.data.tokens.label_sets import LabelSets, SetColumn
from lmwright.data.tokens.tags import TagColumn, Tags
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError

Asked = Classes | Numbers | Windows
"""Subjects of learning beside the tokens of a text."""
COLUMNS: dict[type, Any] = {Tags: TagColumn, Windows: AnswerColumn, LabelSets: SetColumn}
"""Columns that stand beside each token, by what is asked for."""
BESIDE = ("labels", "related", "tagged", "several", "answered")
"""Facts on what stands beside the tokens, which packed rows keep."""


def kinds(conversations: Any, classes: Asked | None, group_tokens: int | None) -> dict[str, Any]:
    """Facts about what the documents are."""
    facts: dict[str, Any] = {
        "masked": conversations is not None or group_tokens is not None,
        "pairs": bool(conversations and conversations.pairs),
        "rated": bool(conversations and conversations.rated),
    }
    facts |= {"labels": list(classes.labels)} if classes else {}
    facts |= {"tagged": True} if isinstance(classes, Tags | Windows | LabelSets) else {}
    facts |= {"answered": True} if isinstance(classes, Windows) else {}
    facts |= {"several": True} if isinstance(classes, LabelSets) else {}
    return facts | ({"related": True} if group_tokens else {})


def fingerprint_of(
    folder: Path,
    parts: Sequence[Any],
    settings: Tokenize,
    conversations: Any,
    facts: dict[str, Any],
    lengths: Mapping[str, tuple[int | None, int | None]] | None,
) -> dict[str, Any]:
    """Fingerprint of everything the output depends on."""
    # Any proven route gives the same ids; a named sentencepiece may settle ties its own way.
    named = settings.route if settings.route == "sentencepiece" else "any"
    fingerprint = {
        "parts": [asdict(p) for p in parts],
        "prepend": settings.prepend,
        "append": settings.append,
        "route": named,
        "tokenizer": facts["tokenizer_fingerprint"],
    }
    if lengths:
        fingerprint["lengths"] = {name: list(limits) for name, limits in lengths.items()}
    if conversations:
        # the template is in the tokenizer's folder; its name says nothing more
        fingerprint["conversations"] = {
            **asdict(conversations),
            "template": template_source(conversations.chat, load_tokenizer(folder / "tokenizer")),
        }
    return fingerprint


def facts_of(tokenizer: Manifest, settings: Tokenize) -> dict[str, Any]:
    """Facts about the tokens. Raises UserError where the tokenizer lacks one that is asked for."""
    facts = {k: tokenizer.facts[k] for k in ("vocab_size", "eos_id", "bos_id")}
    if facts["eos_id"] is None:
        raise UserError(
            'The tokenizer does not define which token ends a document; add "eos_token" to the '
            "tokenizer_config.json beside data.tokenizer.path"
        )
    if settings.prepend == "bos" and facts["bos_id"] is None:
        raise UserError(
            "data.tokenize.prepend='bos': the tokenizer has no bos token; add \"bos_token\" to "
            "the tokenizer_config.json beside data.tokenizer.path, or set it to 'none'"
        )
    return facts | {
        "dtype": "uint16" if facts["vocab_size"] <= 1 << 16 else "uint32",
        "tokenizer_fingerprint": tokenizer.facts["tokenizer_fingerprint"],
    }


def asked_of(
    data: Data,
    kinds: set[str],
    seq_len: int,
    labels: Sequence[str] | None,
    windows: tuple[int, int] | None,
) -> Any:
    """Labels, numbers, tags or answers beside each text, as a run asks for; None for the text
    alone. Raises UserError where windows over contexts do not fit."""
    if row_kinds.ANSWERED in kinds:
        return windows_of(data, seq_len, windows)
    if labels is None:
        return None
    kind = LabelSets if isinstance(labels, row_kinds.AnyOf) else Classes
    kind = Tags if row_kinds.TAGGED in kinds else kind
    return kind(tuple(labels), seq_len) if labels else Numbers(seq_len)
