"""Prompts of a file, each with what a model writes behind it, streamed.

    file --rows--> prompts --ids--> slots --in the order of the file--> lines of JSON

Devices that have all weights each write rows of their own. An interrupted command goes on where it
was (`evals.streamed`).
"""

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lmwright.config.run import Source
from lmwright.core.cards import refuse_lost_card
from lmwright.core.compute import DTYPES
from lmwright.core.copies import num_copies_of, num_sharing
from lmwright.core.param import Tree
from lmwright.data.sources.columns import Bad, ListRow, Row
from lmwright.data.text.chat import UnusableError, parse_cell
from lmwright.evals.chat_prompts import Chat, Message, RefusedError, answer_of
from lmwright.evals.compute import Kernels, compute_text
from lmwright.evals.generate import continued
from lmwright.evals.prompt_rows import ContextFullError, PromptRow
from lmwright.evals.prompted import Asking
from lmwright.evals.sampling import Sampling
from lmwright.evals.streamed import Texts, new_lines, open_texts, refuse_columns, write_lines
from lmwright.formats.load import load_model
from lmwright.formats.tensor_hash import weights_hash
from lmwright.guard.terminal import visible
from lmwright.models import cached

CHAT_COLUMN = "messages"
TOOLS = "tools"
MANY = 1000  # prompts of a file, for what is worth to be compiled


class Prompts(Source):
    """A source of prompts, which may be lists of messages."""

    takes_lists = True
    beside = (TOOLS,)
    option = "--prompt-column"


class TextTally:
    """Counts of texts."""

    def __init__(self) -> None:
        self.bad = self.tokens = 0
        self.ends: Counter[str] = Counter()
        """Texts by the reason why they ended."""

    def add(self, made: Mapping[str, Any]) -> None:
        """Counts a line of what is written."""
        if "error" in made:
            self.bad += 1
        else:
            self.ends[made["finish"]] += 1

    def line(self, seconds: float, how: str) -> str:
        """The counts as a sentence."""
        why = ", ".join(f"{count:,} by {name}" for name, count in self.ends.most_common())
        notes = [f"{self.ends.total():,} texts" + (f", ended {why}" if why else "")]
        notes += [f"{self.bad:,} rows without one"] if self.bad else []
        rate = f"{self.tokens:,} tokens, {self.tokens / max(seconds, 1e-9):,.0f} tokens/s"
        return visible("; ".join([*notes, f"{rate} with compilation", how]), lines=False)


class Writer:
    """A model that writes, ready for the rows of a file."""

    def __init__(self, asking: Asking, w: Tree, tally: TextTally):
        self._asking, self._w, self._tally = asking, w, tally

    def lines(self, rows: Iterator[Row | Bad]) -> Iterator[list[str]]:
        """JSON lines of rows, one at a time, in their order."""
        waiting: deque[tuple[Row | Bad, Chat, str]] = deque()

        def good() -> Iterator[PromptRow]:
            for row in rows:
                asked, (prompt, reason) = None, _prompt_of(row, self._asking.template is not None)
                if isinstance(row, Row) and not reason:
                    asked, reason = self._encoded(row, prompt)
                waiting.append((row, prompt, reason))
                if asked is not None:
                    yield asked

        for written in self._continued(good()):
            while waiting[0][2]:
                yield [self._line(*waiting.popleft(), None)]
            yield [self._line(*waiting.popleft(), written)]
        while waiting:
            yield [self._line(*waiting.popleft(), None)]

    def _continued(self, rows: Iterator[PromptRow]) -> Iterator[PromptRow]:
        how = self._asking
        return continued(
            how.model, self._w, how.tokenizer, rows, how.settings, how.compute,
            end_ids=how.end_ids, filling=how.filling,
        )  # fmt: skip

    def _encoded(self, row: Row, prompt: Chat) -> tuple[PromptRow | None, str]:
        """The prompt with its ids, or the reason why the template or the context has no room for
        it."""
        try:
            return self._asking.row(row.number - 1, prompt, self._tools(row)), ""
        except UnusableError as error:
            return None, str(error)
        except RefusedError as error:
            return None, error.reason
        except ContextFullError as error:
            return None, str(error).partition(": ")[2]

    def _tools(self, row: Row) -> Any:
        """Tools that the assistant has. Raises UnusableError for text that is no JSON."""
        if self._asking.template is None:
            return None
        return parse_cell(json.loads(row.meta).get(TOOLS), TOOLS)

    def _line(self, row: Row | Bad, prompt: Chat, reason: str, written: PromptRow | None) -> str:
        made: dict[str, Any] = {"row": row.number}
        if row.id is not None:
            made["id"] = row.id
        if written is None or isinstance(row, Bad):
            made["error"] = reason
        else:
            text = written.stream.text
            if self._asking.template is None:
                made |= {"prompt": prompt, "text": text}
            else:
                told = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                said = answer_of(self._asking.tokenizer, written.tokens, text)
                made["messages"] = [*told, said]
                made |= {TOOLS: tools} if (tools := self._tools(row)) else {}
            made |= {"finish": written.finish, "tokens": len(written.tokens)}
            self._tally.tokens += len(written.tokens)
        self._tally.add(made)
        return json.dumps(made, ensure_ascii=False) + "\n"


def _prompt_of(row: Row | Bad, chat: bool) -> tuple[Chat, str]:
    """The prompt of a row, or the reason why it has none."""
    if isinstance(row, Bad):
        return "", row.reason
    if not isinstance(row, ListRow):
        return row.text, ""
    if not chat:
        return "", "a list of messages; give --chat"
    told: list[Message] = row.value
    if not told or not all(isinstance(each, dict) and each.get("role") for each in told):
        return "", "no list of messages, each with a role and a content"
    if told[-1]["role"] == "assistant":
        return "", "the last message is the assistant's; end with the one to be answered"
    return told, ""


def write_texts_command(
    path: str,
    file: str,
    *,
    out: str | None = None,
    prompt_column: str | None = None,
    id_column: str | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: tuple[str, ...] = (),
    seed: int = 0,
    adapter: str | None = None,
    devices: int | None = None,
    overwrite: bool = False,
    precision: str | None = None,
    kernels: Kernels = "platform",
    **filling: Any,
) -> int:
    """Writes what a model says to each prompt of a csv, tsv, jsonl or parquet file, or to each line
    of a txt file, as JSON lines to `out` or the terminal; returns 0. In a `chat` a prompt is a
    user's message, or a list of messages. `devices` of this machine have all weights each if there
    is room, else they share them: with None all. Raises UserError where the file cannot be read,
    settings do not fit the model, or `out` exists."""
    settings = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(stop), seed)
    target = new_lines(out, overwrite)
    texts = _open_prompts(file, prompt_column, id_column, chat)
    refuse_lost_card()  # before the weights are read
    loaded = load_model(path, adapter, num_devices=devices, copies=True)
    if loaded.model.fills_masks:  # in batches of its own
        loaded = replace(loaded, num_copies=1)
    asking = Asking.of(
        loaded, settings, MANY * max_new_tokens, chat=chat, filling=filling, precision=precision,
        kernels=kernels, field="--prompts",
    )  # fmt: skip
    compute = asking.compute
    w = loaded.load(dtype=DTYPES[compute.precision])
    del loaded  # what a run directory holds is float32
    tally = TextTally()
    asked: dict[str, Any] = {**vars(settings), "column": texts.source.text_column}
    asked |= {"id_column": id_column, "chat": chat, **filling}
    asked |= {"precision": compute.precision, "kernels": kernels}
    asked |= {"model": weights_hash(w)} if target else {}
    if compute.unroll:
        w = cached.layers_apart(asking.model, w, free=True)
    began = time.monotonic()
    write_lines(texts, Writer(asking, w, tally).lines, tally, target, asked, overwrite=overwrite)
    how = compute_text(compute, num_sharing(w), num_copies_of(w))
    stream = sys.stderr if out is None else sys.stdout
    print(tally.line(time.monotonic() - began, how), file=stream)
    return 0


def _open_prompts(file: str, column: str | None, id_column: str | None, chat: bool) -> Texts:
    """The prompts of a file. Where no column is named they are in `prompt`, or in a chat in
    `messages` if there is no `prompt`."""
    texts = open_texts(file, column or "prompt", id_column, kind=Prompts)
    refuse_columns(texts, file, {"--prompt-column": column, "--id-column": id_column})
    there = texts.columns if chat and column is None else ()
    if CHAT_COLUMN in there and "prompt" not in there:
        return replace(texts, source=replace(texts.source, text_column=CHAT_COLUMN))
    return texts
