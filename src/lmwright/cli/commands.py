"""The verbs: each parses its words and calls one function in one module, imported then.

Nothing here imports jax, pydantic or rich, so that `lmwright --help` answers at once.
"""

from collections.abc import Sequence
from typing import Any

import click

from lmwright import __version__
from lmwright.cli import adapters as adapter_commands
from lmwright.cli import models as model_commands
from lmwright.cli.models import given

OVERRIDES = click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
RUN = click.argument("run", metavar="RUN")
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class InOrder(click.Group):
    """Lists its commands in the order in which they are used, not by alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _load(path: str, overrides: Sequence[str]) -> Any:
    from lmwright.formats.open import load_noted

    run, notes = load_noted(path, overrides)
    for note in notes:
        click.echo(note, err=True)
    return run


@click.group(cls=InOrder, context_settings=CONTEXT)
@click.version_option(__version__, message="%(prog)s %(version)s")
def lmwright() -> None:
    """Prepare data, plan, train and ship language models: TPU, GPU or laptop.

    RUN is a run file (TOML) or a run directory; overrides such as train.steps=500 change
    single fields.

    \b
    Start here:  lmwright quickstart
    """


@lmwright.command()
@click.argument("folder", default="quickstart")
def quickstart(folder: str) -> Any:
    """Do everything once, on Python's own sources.

    Text, tokenizer, training, evaluation, a sample, a report and a Hugging Face folder, in
    a few minutes, all below FOLDER. Run again, it goes on where it stopped.

    \b
    Example:  lmwright quickstart
    """
    from lmwright.cli.quickstart import main

    return main(folder)


@lmwright.command()
@RUN
@OVERRIDES
@click.option(
    "--stage",
    "stages",
    multiple=True,
    type=click.Choice(["normalize", "tokenizer", "tokenize", "pack", "shuffle"]),
    help="Run only this stage; may be repeated. Default: all stages.",
)
def prepare(run: str, overrides: Sequence[str], stages: Sequence[str]) -> Any:
    """Turn text into packed rows of tokens.

    Finished stages whose inputs have not changed are skipped; a killed one continues.

    \b
    Example:  lmwright prepare run.toml data.workers=2
              lmwright prepare run.toml --stage normalize
    """
    from lmwright.data.prepare import prepare_command

    return prepare_command(_load(run, overrides), tuple(stages))


@lmwright.group(cls=InOrder)
def data() -> None:
    """Show prepared data and verify it."""


@data.command("verify")
@click.argument("folder")
def data_verify(folder: str) -> Any:
    """Compare every shard below FOLDER with its hash.

    \b
    Example:  lmwright data verify quickstart/data
    """
    from lmwright.data.rows.store import verify_command

    return verify_command(folder)


@data.command("show")
@RUN
@OVERRIDES
@click.option(
    "-n", "--count", type=click.IntRange(min=1), default=3, help="Number of rows to show."
)
@click.option("--start", type=click.IntRange(min=0), default=0, help="First row, counted from 0.")
@click.option("--sources", is_flag=True, help="Show examples of each source, before prepare.")
def data_show(run: str, overrides: Sequence[str], count: int, start: int, sources: bool) -> Any:
    """Print rows as training sees them, as text.

    Rows come in training order, document by document. Learned tokens are in color, or between
    {+ and +} if the output is not a terminal.

    \b
    Example:  lmwright data show quickstart/run.toml -n 3
              lmwright data show sft.toml --sources --count 1
    """
    from lmwright.data.rows.show import show_command, show_sources

    data = _load(run, overrides).data
    return show_sources(data, start, count) if sources else show_command(data.dir, start, count)


@lmwright.group(cls=InOrder)
def tokenizer() -> None:
    """Train a tokenizer or import one."""


@tokenizer.command("train")
@RUN
@OVERRIDES
def tokenizer_train(run: str, overrides: Sequence[str]) -> Any:
    """Train the tokenizer of RUN on its own sources.

    This runs the first two stages of prepare.

    \b
    Example:  lmwright tokenizer train run.toml data.tokenizer.vocab_size=16384
    """
    from lmwright.data.prepare import prepare_command

    return prepare_command(_load(run, overrides), ("normalize", "tokenizer"))


@tokenizer.command("import")
@click.argument("path")
@click.argument("out")
def tokenizer_import(path: str, out: str) -> None:
    """Read a tokenizer at PATH and write it to the folder OUT.

    PATH is a tokenizer.json or its folder, a folder with vocab.json and merges.txt, a
    tokenizer.model of sentencepiece or a .tiktoken file.

    \b
    Example:  lmwright tokenizer import downloads/gpt2 tokenizers/gpt2
    """
    from lmwright.data.tokens.tokenizer import save_tokenizer
    from lmwright.data.tokens.tokenizer_formats import import_tokenizer

    found = import_tokenizer(path)
    save_tokenizer(found, out)
    click.echo(f"{out}: {found.vocab_size:,} tokens, fingerprint {found.fingerprint}")


@lmwright.group(cls=InOrder)
def config() -> None:
    """Show the resolved run, the presets and the JSON schema."""


@config.command("show")
@RUN
@OVERRIDES
def config_show(run: str, overrides: Sequence[str]) -> None:
    """Print the whole run and the origin of each value.

    The output is itself a run file.

    \b
    Example:  lmwright config show run.toml model.preset=llama-15m
    """
    from lmwright.config.load import show
    from lmwright.formats.open import resolve_layers

    click.echo(show(*resolve_layers(run, overrides)))


@config.command("schema")
def config_schema() -> None:
    """Print the JSON schema of run files, for editors.

    \b
    Example:  lmwright config schema > run.schema.json
    """
    import json

    from lmwright.formats.open import run_schema

    click.echo(json.dumps(run_schema(), indent=1))


@config.command("presets")
def config_presets() -> None:
    """List the presets and recipes that a run file may name.

    \b
    Example:  lmwright config presets
    """
    from lmwright import presets

    found = {section: presets.of_section(section) for section in presets.SECTIONS}
    for section, functions in {"recipe": presets.all_recipes(), **found}.items():
        click.echo(f"{section}:")
        for name, function in functions.items():
            click.echo(f"  {name:<12} {' '.join((function.__doc__ or '').split())}")


@lmwright.command()
def models() -> Any:
    """List the model families, with their architectures and presets.

    \b
    Example:  lmwright models
    """
    from lmwright.presets.table import models_command

    return models_command()


@lmwright.command()
@click.argument("name", metavar="MODEL")
@OVERRIDES
def params(name: str, overrides: Sequence[str]) -> Any:
    """Count parameters, part by part.

    MODEL is a preset, a run file, a run directory, a Hugging Face folder, a .gguf file or
    hf://owner/name, of which only config.json is fetched.

    \b
    Example:  lmwright params kisoku-3b head=untied
              lmwright params run.toml model.num_layers=8
              lmwright params hf://HuggingFaceTB/SmolLM2-135M
    """
    from lmwright.formats.params import params_command

    return params_command(name, list(overrides))


@lmwright.command()
@RUN
@OVERRIDES
@click.option(
    "--on",
    metavar="MACHINE",
    help="v4-32, 2xv5e-256, gpu:h200x8, cpu, kaggle; `any` compares common machines.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Estimate analytically, without the compiler (about two seconds).",
)
@click.option("--search", is_flag=True, help="Find the best mesh, remat, microbatches, optimizer.")
@click.option(
    "--finalists",
    type=click.IntRange(min=1),
    help="Number of configurations that --search compiles.  [default: 4]",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0),
    help="Also show how far a session of this length gets.  [default: limits.session_hours]",
)
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    help="USD per chip-hour, for every machine.  [default: plan.prices, then list prices]",
)
@click.option("--measured", is_flag=True, help="Compare the run directory RUN with its prediction.")
@click.option(
    "--keep", is_flag=True, help="With --measured: correct later predictions for this machine."
)
@click.option("--forget", is_flag=True, help="With --measured: stop correcting them.")
@click.option("--json", is_flag=True, help="Print JSON instead of text.")
@click.option("--out", metavar="FOLDER", help="Also write FOLDER/plan.json.")
def plan(run: str, overrides: Sequence[str], **options: Any) -> Any:
    """Predict memory, speed and cost on hardware you don't have.

    For TPU slices, the TPU's own compiler compiles the train step here; this needs the extra
    tpu, but no TPU, account or network. GPUs, CPUs and --quick use an analytic estimate.

    RUN may also be a preset, a Hugging Face folder or a GGUF file: then recipe pretrain, the
    model's own row length and the largest batch that fits are assumed, and the answer says so.

    \b
    Exit code: 0 the run fits, 1 it does not, 2 wrong input, 3 this host has too little memory
    for the compiler, 130 interrupted.

    \b
    Example:  lmwright plan run.toml --on v4-32
              lmwright plan run.toml train.remat=block --on v5e-8 --quick --hours 9
              lmwright plan run.toml --on v4-32 --search --finalists 2
              lmwright plan run.toml --on any --price 1.20
              lmwright plan llama-8b --on v5p-16 --quick
              lmwright plan --measured runs/mine
    """
    from lmwright.planner.command import Wanted, plan_named

    return plan_named(run, overrides, Wanted(**given(**options)))


@lmwright.command()
@RUN
@OVERRIDES
@click.option("--pod", is_flag=True, help="This is one of several hosts; JAX finds the others.")
def train(run: str, overrides: Sequence[str], pod: bool) -> Any:
    """Train a model, or resume an interrupted run.

    Ctrl-C saves and says how to continue; a second one stops at once. On a TPU pod, start it
    on every host with --pod and one run directory that all of them see.

    \b
    Example:  lmwright train run.toml train.steps=2000
    """
    from lmwright.train.signals import StopRequest

    with StopRequest() as stop:
        loaded = _load(run, overrides)
        from lmwright.train.command import train_command

        return train_command(loaded, stop=stop, **given(pod=pod or None))


@lmwright.command()
@RUN
@OVERRIDES
@click.option("--dry-run", is_flag=True, help="Only list the runs.")
def sweep(run: str, overrides: Sequence[str], dry_run: bool) -> Any:
    """Train a small grid of runs and compare them in one report.

    The run file's [sweep.grid] and [[sweep.cases]] define the runs. Run it again to continue
    where it stopped.

    \b
    Example:  lmwright sweep run.toml --dry-run
    """
    from lmwright.train.sweep import sweep_command

    return sweep_command(run, overrides, dry_run=dry_run)


for verb in (*model_commands.VERBS, adapter_commands.adapters):
    lmwright.add_command(verb)


@lmwright.command()
@click.argument("run_dirs", nargs=-1, required=True)
@click.option("-o", "--out", help="HTML file; default: report.html in the run directory.")
def report(run_dirs: Sequence[str], out: str | None) -> None:
    """Write report.html for one run or several side by side.

    \b
    Example:  lmwright report quickstart/run
              lmwright report runs/a runs/b -o compare.html
    """
    from lmwright.report.html import report_command

    report_command(list(run_dirs), out)
