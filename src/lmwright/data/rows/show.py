"""Rows as text, for inspection before training.

What is learned is in color; where the output is no terminal it stands {+between these+}.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from lmwright.config.rows import PLAIN
from lmwright.config.run import Data
from lmwright.data.rows.record import unpack_rows
from lmwright.data.rows.store import TokenStore
from lmwright.data.sources.columns import Bad, Row, refuse_plain
from lmwright.data.sources.file import Slice
from lmwright.data.sources.files import find_files, source_names
from lmwright.data.sources.read import read_rows
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_encode import ChatEncoder
from lmwright.data.text.chat_template import chosen_template
from lmwright.data.tokens.answers import CONTEXT, ENDS, STARTS
from lmwright.data.tokens.hub_tokenizer import pinned_path
from lmwright.data.tokens.label_sets import names_in
from lmwright.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError
from lmwright.guard.terminal import visible

LEARNED = "green"
LIKED = ("not liked", "liked")
TEXTS = ("anchor", "positive", "negative")
WITHOUT_END = 1 << 30  # tokens; examples are shown whole


def show_command(data_dir: str, start: int = 0, count: int = 3) -> None:
    """Prints rows start..start+count-1 of the first epoch, in the order of training."""
    store = TokenStore.open(data_dir)
    if start >= store.epoch_rows:
        raise UserError(
            f"{data_dir}: has {store.epoch_rows} rows; --start {start} is beyond the last one"
        )
    tokenizer = load_tokenizer(store.tokenizer_dir)
    console = Console(highlight=False, soft_wrap=True)
    stop = min(start + count, store.epoch_rows)
    _say(console, f"{data_dir}: {store.epoch_rows:,} rows of {store.seq_len} tokens an epoch")
    for number, record in enumerate(store.records(start, stop), start):
        pieces = list(row_pieces(record))
        tokens = sum(len(ids) for ids, _ in pieces)
        _say(console, f"\nrow {number}: {tokens} tokens, {store.seq_len - tokens} padding")
        anchor = 0
        for place, (ids, weights) in enumerate(pieces, 1):
            label, learned = weights[0], [False, *(n > 0 for n in weights[1:])]
            head = f"  document {place}, {len(ids)} tokens"
            if store.several:
                head += f", {', '.join(names_in(weights, store.labels)) or 'no label'}"
            elif store.related and store.labeled:  # each second text is the pair's
                head += f", {label:g}" if place % 2 else ", pair"
            elif store.labeled and not store.tagged:
                head += f", {store.labels[int(label)] if store.labels else f'{label:g}'}"
            elif store.related:
                anchor = place if label else anchor
                head += f", {TEXTS[min(place - anchor, 2)]}"
            if store.answered:
                _show_question(console, head, tokenizer, ids, weights)
                continue
            if store.tagged:
                _say(console, f"{head}: {in_words(tokenizer, ids, weights, store.labels)}")
                continue
            if not store.masked or store.related:
                _say(console, f"{head}: {tokenizer.decode(ids)!r}")
                continue
            rating = f", {LIKED[label > 0]}" if store.rated else ""
            _say(console, f"{head}, {sum(learned)} learned{rating}:")
            console.print(in_color(tokenizer, ids, learned, marks=not console.is_terminal))


def row_pieces(record: np.void) -> Iterator[tuple[list[int], list[float]]]:
    """Token ids and weights of each document (or piece of one) of a packed row, without padding;
    the first weight is the number of its class, or above 0 where the answer was liked."""
    row = unpack_rows(record[None], rated=True)  # [1, T]
    segments = row["segment_ids"][0]
    for segment in range(1, int(segments.max()) + 1):
        mine = segments == segment
        yield row["tokens"][0][mine].tolist(), row["loss_weight"][0][mine].tolist()


def in_words(
    tokenizer: TextTokenizer, ids: Sequence[int], numbers: Sequence[float], labels: Sequence[str]
) -> str:
    """A tagged text, each of its words with its tag: "Ada/B-PER slept/O"; `numbers` are those of
    tags plus 1 where a word begins."""
    first = [place for place, number in enumerate(numbers) if number]
    words = (tokenizer.decode(ids[a:b]).strip() for a, b in itertools.pairwise([*first, len(ids)]))
    tags = (labels[int(numbers[place]) - 1] for place in first)
    return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def _show_question(
    console: Console,
    head: str,
    tokenizer: TextTokenizer,
    ids: Sequence[int],
    weights: Sequence[float],
) -> None:
    """Prints a window: its question, its answer, and its context with the answer in color."""
    marks = [int(weight) for weight in weights]
    places = [next(i for i, m in enumerate(marks) if m & bit) for bit in (CONTEXT, STARTS, ENDS)]
    begin, first, last = places
    answer = repr(tokenizer.decode(ids[first : last + 1]).strip()) if first else "no answer"
    _say(console, f"{head}: {tokenizer.decode(ids[:begin])!r}: {answer}")
    there = [first <= i <= last and first > 0 for i in range(begin, len(ids))]
    console.print(in_color(tokenizer, ids[begin:], there, marks=not console.is_terminal))


def show_sources(data: Data, start: int = 0, count: int = 3) -> None:
    """Prints examples start..start+count-1 of each source that holds any, straight from its
    files. Raises UserError where there are none, or no tokenizer yet."""
    console = Console(highlight=False, soft_wrap=True)
    named = zip(source_names(data.sources), data.sources, strict=True)
    chats = [(name, source) for name, source in named if source.rows not in PLAIN]
    if not chats:
        raise UserError("data.sources: none holds examples (data.sources.rows); drop --sources")
    tokenizer = _tokenizer(data)
    end_id = tokenizer.eos_id if data.tokenize.append == "eos" else None
    template = chosen_template(data.chat, tokenizer)
    encoder = ChatEncoder(template, tokenizer, data.chat, WITHOUT_END, end_id)
    for name, source in chats:
        files = find_files(source, data.dir)
        refuse_plain(source, files)
        rows = itertools.chain.from_iterable(read_rows(Slice(file), source) for file in files)
        for row in itertools.islice(rows, start, start + count):
            _show_example(console, name, row, encoder)


def _show_example(console: Console, name: str, row: Row | Bad, encoder: ChatEncoder) -> None:
    name = visible(name, lines=False)
    try:
        if isinstance(row, Bad):
            raise UnusableError(row.reason)
        example = encoder.encode(json.loads(row.text))
    except UnusableError as e:
        _say(console, f"\n{name}, row {row.number}: cannot be used: {e}")
        return
    ids, learned = example.ids.tolist(), example.learned.tolist()
    rating = "" if example.liked is None else f", {LIKED[example.liked]}"
    _say(console, f"\n{name}, row {row.number}: {len(ids)} tokens, {sum(learned)} learned{rating}")
    console.print(in_color(encoder.tokenizer, ids, learned, marks=not console.is_terminal))


def _tokenizer(data: Data) -> TextTokenizer:
    path = pinned_path(data.dir, data.tokenizer)
    if path is not None:
        return import_tokenizer(path)
    folder = Path(data.dir) / "tokenizer"
    if not folder.exists():
        raise UserError(
            f"{folder}: there is no tokenizer yet; run `lmwright tokenizer train` or set "
            "data.tokenizer.path"
        )
    return load_tokenizer(folder)


def in_color(
    tokenizer: TextTokenizer, ids: Sequence[int], learned: Sequence[bool], *, marks: bool
) -> Text:
    """Text of ids [tokens] with the learned ones in color, or within {+ +} with `marks`."""
    text, at, before = Text(), 0, ""
    for is_learned, group in itertools.groupby(learned):
        at += len(list(group))
        # decoded with what is before it: a token alone may lose its blank
        whole = tokenizer.decode(ids[:at])
        piece, before = visible(whole[len(before) :]), whole
        if marks:
            text.append(f"{{+{piece}+}}" if is_learned else piece)
        else:
            text.append(piece, style=LEARNED if is_learned else "dim")
    return text


def _say(console: Console, line: str) -> None:
    console.print(visible(line), markup=False)
