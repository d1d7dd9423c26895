"""Added tokens: those that files beside a vocabulary name, as transformers adds them.

added_tokens.json                                {"<|im_start|>": 32000}
tokenizer_config.json   added_tokens_decoder     {"32000": {"content": "<|im_start|>", ...}}
                        additional_special_tokens, extra_special_tokens

Those of the two lists are special where the vocabulary has them; without an id they are left out. A
folder with tokenizer.json mostly has all of them there already.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from lmwright.data.tokens.tokenizer import ROLES, TextTokenizer, find_roles, read_json
from lmwright.errors import UserError

FILE, CONFIG, MAP = "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json"
LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def with_added(tokenizer: TextTokenizer, folder: Path) -> TextTokenizer:
    """The tokenizer of a folder with the tokens that its files name and its vocabulary does not
    match in texts. Raises UserError for a token that would have another id than they say."""
    backend = tokenizer.backend
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted = {t.content: (i, t) for i, t in _named(folder) if t.content not in known}
    if not wanted:
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    for content, (number, token) in wanted.items():
        old_id = backend.token_to_id(content)
        if old_id is None and number is None:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        new_id = backend.token_to_id(content)
        if old_id is None and new_id != number:
            raise UserError(
                f"{folder}: {content!r} has the id {number} in {FILE} or {CONFIG}, and the next "
                f"one of the vocabulary is {new_id}; the files do not belong to the same tokenizer"
            )
    roles = read_json(folder / MAP) | read_json(folder / CONFIG)
    found_roles = find_roles(backend, roles) if roles else {}  # which may be among them
    return replace(tokenizer, backend=backend, sentencepiece=None, **found_roles)


def _named(folder: Path) -> Iterator[tuple[int | None, tokenizers.AddedToken]]:
    """Tokens in the order of their ids, which are None for those that have none."""
    config, more, plain = (read_json(folder / name) for name in (CONFIG, MAP, FILE))
    try:
        yield from _read(config, more, plain)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder}: {FILE} or the added tokens of {CONFIG} cannot be read ({error}); download "
            "them again"
        ) from None


def _read(
    config: Mapping[str, Any], more: Mapping[str, Any], plain: Mapping[str, Any]
) -> Iterator[tuple[int | None, tokenizers.AddedToken]]:
    listed, roles = [], []
    for file in (more, config):
        for name in LISTS:
            listed += map(text_of, _values(file.get(name)))
        roles += [text_of(file.get(f"{role}_token")) for role in ROLES]
    special = {*listed, *roles}
    by_id = {
        int(i): tokenizers.AddedToken(text, normalized=False, special=text in special)
        for text, i in plain.items()
    }
    for i, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(entry.get(name, False)) for name in FLAGS}
        text = entry["content"]
        is_special = bool(entry.get("special", False)) or text in special
        by_id[int(i)] = tokenizers.AddedToken(text, special=is_special, **flags)
    yield from sorted(by_id.items())
    named = {token.content for token in by_id.values()}
    for text in dict.fromkeys(listed):
        if text and text not in named:
            yield None, tokenizers.AddedToken(text, normalized=False, special=True)


def _values(said: Any) -> list[Any]:
    return list(said.values()) if isinstance(said, dict) else list(said or ())


def text_of(token: Any) -> str | None:
    """The text of a token as configs name it: itself, or in a table."""
    return token.get("content") if isinstance(token, dict) else token
