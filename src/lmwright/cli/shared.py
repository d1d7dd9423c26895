"""Arguments and options that verbs share. Nothing here imports jax, pydantic or rich."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from lmwright.cli.output import BrokenPipe
from lmwright.errors import UserError
from lmwright.guard.unread import is_of_pipe

OVERRIDES = click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
RUN = click.argument("run", metavar="RUN")


class Words(click.types.StringParamType):
    """Parameter type of words, which shells complete as names of files."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


WORDS = Words()


class InOrder(click.Group):
    """Lists its commands in the order in which they are used, not by alphabet."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        for param in cmd.params:
            param.type = WORDS if param.type is click.STRING else param.type
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (OSError, SystemExit) as error:
            if is_of_pipe(error):
                raise BrokenPipe from error
            raise


def load(path: str, overrides: Sequence[str], *left_out: str) -> Any:
    """The run of a file or a directory, without the tables `left_out`; what was chosen for it is
    printed."""
    from lmwright.formats.open import load_noted

    run, notes = load_noted(path, overrides, *left_out)
    for note in notes:
        click.echo(note, err=True)
    return run


def given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line, so that defaults stay with the function."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def flag_of(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def in_options(error: UserError, options: Iterable[str]) -> UserError:
    """The error, with options of a command in place of the settings that it is about."""
    flags = {name: flag_of(name) for name in options}
    head, _, rest = str(error).partition(":")
    named = head.split(", ")
    if not set(named) <= flags.keys():
        return error
    rest = re.sub(r"\w+_\w+", lambda word: flags.get(word[0], word[0]), rest)
    return UserError(f"{', '.join(flags[name] for name in named)}:{rest}")


REHEARSE = click.option(
    "--rehearse",
    type=click.Choice(["stop", "go"]),
    help="First try ten steps, a save, a resume, an export and a text, in a folder of their own, "
    "and print a checklist; `go` trains if all holds.  [without a word: stop]",
)


def with_word(args: list[str]) -> list[str]:
    """Arguments in which a bare --rehearse is followed by its default word."""
    pairs = zip(args, [*args[1:], ""], strict=False)
    bare = [word == "--rehearse" and after not in ("stop", "go") for word, after in pairs]
    return [f"{word}=stop" if alone else word for word, alone in zip(args, bare, strict=True)]


class Rehearsed(click.Command):
    """A command with REHEARSE, whose word may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_word(args))


OF_EXPORT = {
    "q8_0": "",
    "tq1_0": " of a BitNet",
    "tq2_0": " of a BitNet",
}
"""Types of llama.cpp that export writes, and of which models."""
OF_QUANTIZE = ("q4_0", "iq4_nl", "q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_m")


class Dtype(click.Choice):
    """Parameter type of written dtypes; for other types of llama.cpp the error says what makes
    them."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        message = f"{value!r} is not one of {', '.join(map(str, self.choices))}"
        name = str(value).lower()
        if name in OF_QUANTIZE:
            message += f"; `lmwright quantize MODEL FILE.gguf --to {name}` writes it"
        elif name in OF_EXPORT:
            wrote = f"lmwright export MODEL FILE.gguf --dtype {name}"
            message += f"; `{wrote}` writes it{OF_EXPORT[name]}"
        elif re.fullmatch(r"i?q\d\w*|tq\d\w*", name):
            message += (
                "; llama.cpp alone makes its other types: write a .gguf in bf16 and give it to "
                "llama-quantize"
            )
        return message


class Numbers(click.ParamType):
    """Parameter type of comma-separated numbers, each from `low` to `high`."""

    name = "numbers"

    def __init__(self, kind: type, low: float, high: float | None = None):
        self._kind, self._low, self._high = kind, low, high

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        try:
            numbers = tuple(self._kind(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,3", param, ctx)
        high = math.inf if self._high is None else self._high
        for number in numbers:
            if not self._low <= number <= high:
                limit = "" if self._high is None else f" and at most {self._high}"
                self.fail(f"{number} must be at least {self._low}{limit}", param, ctx)
        return tuple(dict.fromkeys(numbers))


class Text(click.ParamType):
    """Parameter type of texts for a tokenizer, which are whole characters."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        try:
            str(value).encode()
        except UnicodeEncodeError:  # Python's form of bytes that are no UTF-8
            self.fail(f"{value!r} is not UTF-8 text", param, ctx)
        return str(value)


def computed(command: Any) -> Any:
    """Adds the options that say how a model is evaluated."""
    precision = click.option(
        "--precision",
        type=click.Choice(["fp32", "bf16"]),
        help="Precision of activations and matmuls; default: the fastest here, or on a run's "
        "held-out data the run's.",
    )
    kernels = click.option(
        "--kernels",
        type=click.Choice(["platform", "reference"]),
        help="`reference` is slower, for comparison; default: platform.",
    )
    return precision(kernels(command))


def of_model(command: Any) -> Any:
    """Adds the options that say which model it is and which devices compute."""
    adapter = click.option("--adapter", help="Adapter to use if the run has several.")
    devices = click.option(
        "--devices",
        type=click.IntRange(min=1),
        help="Devices of this machine; default: one, or all for files of texts and large weights.",
    )
    return adapter(devices(command))


OF_TASKS = ("shots", "limit", "chat", "data", "out", "against")


def with_tasks(command: Any) -> Any:
    """Adds the options of benchmarks to `eval`."""
    options = (
        click.option(
            "--tasks",
            metavar="NAMES",
            help="Answer tasks of lm-evaluation-harness, or questions of .jsonl or .yaml files; "
            "commas between.",
        ),
        click.option(
            "--shots",
            type=click.IntRange(min=0),
            help="Solved examples before each question of --tasks; default: as the task says.",
        ),
        click.option(
            "--limit", type=click.IntRange(min=1), help="Questions of each task; default: all."
        ),
        click.option(
            "--chat",
            is_flag=True,
            default=None,
            help="Prompts of --tasks in the model's chat template.",
        ),
        click.option(
            "--data", metavar="FOLDER", help="Data of named --tasks; default: the Hugging Face hub."
        ),
        click.option(
            "--out", metavar="FILE", help="Write each question and answer of --tasks (.json)."
        ),
        click.option(
            "--against",
            metavar="FILE",
            help="Compare with another model's answers, which --out wrote; MODEL may be such a "
            "file, too.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def refuse_beside_tasks(options: dict[str, Any], by_position: bool, needle: bool) -> None:
    """Raises UsageError for options of `eval` that do not go together with --tasks."""
    if "tasks" not in options:
        alone = next((name for name in OF_TASKS[:-1] if name in options), None)
        if alone is not None:
            raise click.UsageError(f"{flag_of(alone)} needs --tasks")
        if "devices" in options and "text" not in options and not needle:
            raise click.UsageError(
                "--devices: held-out data are computed on the devices of mesh; leave it out"
            )
        if "against" not in options:
            return
    used = ("tasks", *OF_TASKS, "adapter", "devices", "precision", "kernels")
    if "tasks" not in options:
        used = ("against",)
    idle = next((name for name in options if name not in used), None)
    if by_position or needle or idle is not None:
        what = "--by-position and --needle" if idle is None else flag_of(idle)
        of = "--tasks" if "tasks" in options else "--against"
        raise click.UsageError(f"{what}: no effect on {of}; leave it out")


def sampled(command: Any) -> Any:
    """Adds the options that say how tokens are chosen, and where a text ends."""
    options = (
        click.option(
            "--temperature",
            type=click.FloatRange(min=0),
            help="0 takes the most likely token; default: 0.",
        ),
        click.option(
            "--top-k",
            type=click.IntRange(min=1),
            help="Sample from the k most likely; default: all.",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(min=0, max=1, min_open=True),
            help="Sample from the most likely tokens with this total probability; default: 1.",
        ),
        click.option("--stop", multiple=True, help="String that ends a text; may be repeated."),
        click.option(
            "--seed", type=click.IntRange(min=0), help="Seed of the sampling; default: 0."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
