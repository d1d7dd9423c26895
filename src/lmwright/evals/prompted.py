"""Prompts continued with a model wherever it lies, and the command `lmwright generate`.

model, prompts --ask--> ids, what ends a text, how it is computed --generate--> texts
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lmwright.core.cards import refuse_lost_card
from lmwright.core.compute import DTYPES, Compute
from lmwright.core.param import Tree, map_params
from lmwright.core.spread import num_devices_of
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.chat_prompts import Chat, encode_chats, ending_answers, own_template
from lmwright.evals.compute import Kernels, compute_text, spread, text_compute
from lmwright.evals.fill import Filling
from lmwright.evals.generate import Generation, filling_for, generate, num_steps
from lmwright.evals.prompt_rows import OnText, PromptRow, row_of
from lmwright.evals.sampling import Sampling
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.guard.terminal import visible
from lmwright.models import cached


@dataclass(frozen=True)
class Asking:
    """A model that is asked, without its weights, and how."""

    model: Any
    tokenizer: TextTokenizer
    prefix: tuple[int, ...]
    """Ids that begin every prompt."""
    settings: Sampling
    end_ids: tuple[int, ...]
    """Ids that end a text, beside the tokenizer's own."""
    template: ChatTemplate | None
    """The template of a chat, in which prompts are messages."""
    filling: Filling | None
    """Settings of a model that fills in masks."""
    compute: Compute
    field: str
    """Name of the prompts in errors."""

    @classmethod
    def of(
        cls, loaded: LoadedModel, settings: Sampling, num_tokens: int, *, chat: bool,
        filling: Mapping[str, Any] | None, precision: str | None, kernels: Kernels, field: str,
    ) -> "Asking":  # fmt: skip
        """Settings for `num_tokens` tokens, one after the other, or filled in. Raises UserError for
        settings that do not fit the model."""
        model = loaded.model
        shapes = map_params(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), model.spec())
        compute = text_compute(model, shapes, num_tokens, precision, kernels)
        how = filling_for(model, Filling(**filling) if filling else None, settings)
        end_ids, template = loaded.end_ids, None
        if chat:
            template = own_template(
                loaded,
                "continue texts by `lmwright generate` without --chat, or train with "
                "data.chat.template",
            )
            settings, ends = ending_answers(settings, template, loaded.tokenizer)
            end_ids = (*end_ids, *ends)
        return cls(
            model, loaded.tokenizer, loaded.prompt_prefix, settings, end_ids, template, how,
            spread(compute, loaded.num_devices), field,
        )  # fmt: skip

    def row(self, number: int, prompt: Chat, tools: Any = None) -> PromptRow:
        """A prompt with its ids; in a chat the assistant has `tools`. Raises UserError for one that
        does not fit the model, ContextFullError where it leaves no room."""
        asked: Any = prompt
        if self.template is not None:
            told = self.template, self.tokenizer, self.field, tools
            (asked,) = encode_chats([prompt], *told)
        return row_of(number, asked, self.model, self.tokenizer, self.settings, self.prefix)


@dataclass(frozen=True)
class Asked:
    """Prompts as a model reads them, and how it continues them."""

    asking: Asking
    prompts: list[list[int]]

    @property
    def compute(self) -> Compute:
        """Settings of the computation."""
        return self.asking.compute

    def texts(self, w: Tree, on_text: OnText | None = None) -> list[Generation]:
        """The continuations; `w` are the weights as `weights_of` or `kept_weights` give them."""
        how = self.asking
        return generate(
            how.model, w, how.tokenizer, self.prompts, how.settings, how.compute, on_text,
            prefix=(), end_ids=how.end_ids, filling=how.filling,
        )  # fmt: skip


def ask(
    loaded: LoadedModel,
    prompts: Sequence[Chat],
    settings: Sampling,
    *,
    precision: str | None = None,
    kernels: Kernels = "platform",
    chat: bool = False,
    filling: Mapping[str, Any] | None = None,
    field: str = "--prompt",
) -> Asked:
    """Encodes prompts for a model, as messages of a user or conversations in a `chat`; `filling`
    are fields of `Filling`, `field` is the name of the prompts in messages. Raises UserError for
    prompts and settings that do not fit the model, ContextFullError for one that leaves no room."""
    asking = Asking.of(
        loaded, settings, num_steps(prompts, settings), chat=chat, filling=filling,
        precision=precision, kernels=kernels, field=field,
    )  # fmt: skip
    return Asked(asking, [asking.row(number, each).ids for number, each in enumerate(prompts)])


def generate_command(
    path: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
    precision: str | None = None,
    kernels: Kernels = "platform",
    adapter: str | None = None,
    devices: int | None = None,
    chat: bool = False,
    **filling: Any,
) -> list[Generation]:
    """Continues prompts with the model of a run directory or HF folder and prints them: a single
    one as it is generated, several after all are done. In a `chat` each is a user's message, which
    is answered. `devices` of this machine share the weights: with None one, or all where one is
    too small. `filling` are fields of `Filling`."""
    settings = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(stop), seed)
    if not prompts:
        raise UserError("prompt: missing; add --prompt TEXT")
    refuse_lost_card()  # before the weights are read
    loaded = load_model(path, adapter, num_devices=devices)
    asked = ask(
        loaded, prompts, settings, precision=precision, kernels=kernels, chat=chat, filling=filling
    )  # what is wrong is said before anything is printed
    shown = [f"{prompt}\n" for prompt in prompts] if chat else prompts
    began = time.monotonic()
    on_text = (lambda _row, text: show(text)) if len(prompts) == 1 else None
    if on_text:
        show(shown[0])
    w = weights_of(loaded, asked.compute)
    del loaded  # what a run directory holds is float32
    texts = asked.texts(w, on_text)
    if on_text:
        print()
    else:
        for prompt, generation in zip(shown, texts, strict=True):
            show(f"{prompt}{generation.text}\n\n")
    _print_speed(texts, time.monotonic() - began, asked.compute, num_devices_of(w))
    return texts


def weights_of(loaded: LoadedModel, compute: Compute, *, free: bool = True) -> Tree:
    """The weights as `generate` reads them, once and in its precision. With `free`, those of a run
    directory cannot be read from `loaded` any more."""
    w = loaded.load(dtype=DTYPES[compute.precision])
    return cached.layers_apart(loaded.model, w, free=free) if compute.unroll else w


def kept_weights(loaded: LoadedModel, compute: Compute) -> Tree:
    """The weights as `generate` reads them, kept in `loaded` for the next prompts."""
    key = compute.precision, compute.unroll
    if key not in loaded.kept:
        loaded.kept.clear()
        own = not isinstance(loaded.tensors, HfTensors)  # else they may be the run's
        loaded.kept[key] = weights_of(loaded, compute, free=own)
    return loaded.kept[key]


def show(text: str) -> None:
    """Prints text unchanged to a file or pipe; on a terminal, control characters are escaped."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def _print_speed(
    generations: list[Generation], seconds: float, compute: Compute, num_devices: int
) -> None:
    """Prints the speed to stderr, so that stdout has only the text."""
    count = sum(len(generation.tokens) for generation in generations)
    why = ", ".join(sorted({generation.finish for generation in generations}))
    print(
        f"[{count} tokens, {count / max(seconds, 1e-9):.0f} tokens/s with compilation; ended by: "
        f"{why}; {compute_text(compute, num_devices)}]",
        file=sys.stderr,
    )
