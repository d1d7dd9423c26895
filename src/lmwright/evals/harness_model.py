"""A model as lm-evaluation-harness asks it. Importing this needs the extra `eval`."""

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.errors import UserError
from lmwright.evals.chat_prompts import own_template
from lmwright.evals.compute import text_compute
from lmwright.evals.generate import generate
from lmwright.evals.likelihood import log_likelihoods
from lmwright.evals.sampling import Sampling
from lmwright.formats.loaded import LoadedModel

MOST_NEW_TOKENS = 256  # where a task says nothing, as the harness has it
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the most tokens of an answer; the first counts."""


class HarnessModel(TemplateLM):
    """Our model behind the harness's interface; the harness encodes and scores."""

    def __init__(
        self, loaded: LoadedModel, w: Tree, compute: Compute,
        on_progress: Callable[..., None] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.loaded, self.w, self.compute = loaded, w, compute
        self._tell = on_progress or (lambda **_: None)
        self._own = loaded.tokenizer
        self._template: ChatTemplate | None = None
        if self.prefix_token_id is None:
            raise UserError(f"{loaded.place}: its tokenizer has no token to start a text from")

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._own.bos_id if self._own.eos_id is None else self._own.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text of which all is scored."""
        return self._own.eos_id if self._own.bos_id is None else self._own.bos_id

    @property
    def tokenizer_name(self) -> str:
        """The harness keeps prompts by this name."""
        return str(self.loaded.path)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text, behind those that begin a text; None adds them where they are missing."""
        ids, before = self._own.encode(string, parse_special=True), [*self.loaded.prompt_prefix]
        there = ids[: len(before)] == before and add_special_tokens is None
        return ids if there or add_special_tokens is False else [*before, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        self._tell(total=len(pairs), completed=0)
        return log_likelihoods(self.loaded.model, self.w, pairs, self.compute, self._done)

    def _done(self, count: int) -> None:
        self._tell(advance=count)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each whole text, in windows of the model's context that do not
        overlap."""
        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text), prefix_token=self.prefix_token_id,
                max_seq_len=self.loaded.model.seq_len, context_len=1,
            )  # fmt: skip
            own = [make_disjoint_window(window) for window in windows]
            counts.append(len(own))
            pairs += own
        scores = iter(self._loglikelihood_tokens([(None, *pair) for pair in pairs]))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that the model writes after each context, up to one of the strings in `until`."""
        texts: list[str] = [""] * len(requests)
        groups: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_sampling(request.args[1]), []).append(number)
        self._tell(total=len(requests), completed=0)
        for settings, numbers in groups.items():
            room = self.loaded.model.seq_len - settings.max_new_tokens
            if room < 1:
                raise UserError(
                    f"--tasks: answers of {settings.max_new_tokens} tokens leave no room in the "
                    f"model's context of {self.loaded.model.seq_len}"
                )
            prompts = [self.tok_encode(requests[n].args[0])[-room:] for n in numbers]
            order = sorted(range(len(numbers)), key=lambda i: -len(prompts[i]))
            compute = text_compute(self.loaded.model, self.w, settings.max_new_tokens,
                                   self.compute.precision)  # fmt: skip
            made = generate(
                self.loaded.model, self.w, self._own, [prompts[i] for i in order], settings,
                compute, prefix=(), end_ids=self.loaded.end_ids, on_done=self._done,
            )  # fmt: skip
            for i, one in zip(order, made, strict=True):
                texts[numbers[i]] = one.text
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation in the tokenizer's chat template."""
        if self._template is None:
            self._template = own_template(self.loaded, "leave out --chat")
        try:
            return self._template.render({"messages": chat_history}, prompt=add_generation_prompt)
        except UnusableError as error:
            raise UserError(f"--chat: {self.loaded.place}: {error}; leave it out") from None

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the template, which the harness notes."""
        return self._own.chat_template or ""


def _sampling(wanted: dict[str, Any]) -> Sampling:
    """Settings for a task's `generation_kwargs`. Raises UserError for those that are not there."""
    wanted = dict(wanted)
    until = wanted.pop("until", None) or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    most = next(filter(None, [wanted.pop(name, None) for name in LENGTHS]), MOST_NEW_TOKENS)
    samples, heat = wanted.pop("do_sample", None), float(wanted.pop("temperature", 0.0) or 0.0)
    if samples is False:  # whatever the temperature: that of LongBench is 1
        heat = 0.0
    top_p, top_k = wanted.pop("top_p", None), wanted.pop("top_k", None)
    if wanted:
        raise UserError(
            f"--tasks: a task asks for {', '.join(wanted)} in its generation, which is not "
            "supported"
        )
    more = {"top_p": top_p, "top_k": top_k} if heat else {}
    return Sampling(int(most), heat, stop=tuple(s for s in until if s), **more)
