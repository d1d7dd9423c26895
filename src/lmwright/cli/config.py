"""The verbs that show what can be configured: config, models, params."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from lmwright.cli.shared import OVERRIDES, RUN, InOrder
from lmwright.config.rows import ROW_PARTS

ROWS = ["text", *ROW_PARTS]


@click.command()
@click.argument("file", metavar="FILE.toml")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("--model", help="Model to start from, or a preset; default: llama-15m.")
@click.option("--lora", is_flag=True, help="Train an adapter of the model.")
@click.option("--rows", type=click.Choice(ROWS), help="Kind of rows; default: by columns.")
@click.option("--overwrite", is_flag=True, help="Replace FILE.toml if it exists.")
def init(file: str, texts: Sequence[str], **options: Any) -> None:
    """Write a run file for your data.

    TEXT is a file, a folder, a glob, a URL or hf://datasets/owner/name, as in data.sources. Its
    first rows tell whether they are texts, conversations, preferences, labeled texts and so on.

    \b
    Example:  lmwright init mine.toml texts/
              lmwright init chat.toml chats.jsonl --model hf://HuggingFaceTB/SmolLM2-135M --lora
    """
    from lmwright.cli.init import init_command

    init_command(file, texts, **options)


@click.group(cls=InOrder)
def config() -> None:
    """Show the resolved run, the presets and the JSON schema."""


@config.command("show")
@RUN
@OVERRIDES
@click.option("--all", "defaults", is_flag=True, help="Also print what nothing sets: the defaults.")
def config_show(run: str, overrides: Sequence[str], defaults: bool) -> None:
    """Print the resolved run and the origin of each value.

    The output is itself a run file.

    \b
    Example:  lmwright config show run.toml model.preset=llama-15m
    """
    from lmwright.config.show import show
    from lmwright.formats.open import resolve_layers

    click.echo(show(*resolve_layers(run, overrides), defaults=defaults))


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
    from lmwright.presets.sources import SOURCES

    names = {section: presets.of_section(section) for section in presets.SECTIONS}
    for section, functions in {"recipe": presets.all_recipes(), **names}.items():
        said = {name: " ".join((each.__doc__ or "").split()) for name, each in functions.items()}
        _echo_table(section, said)
    _echo_table("data.sources", {name: preset.line for name, preset in SOURCES.items()})


def _echo_table(title: str, table: Mapping[str, str]) -> None:
    width = max(map(len, table), default=0)
    click.echo(
        "\n".join([f"{title}:", *(f"  {name:<{width}} {text}" for name, text in table.items())])
    )


@click.command()
def models() -> Any:
    """List the model families, with their architectures and presets.

    \b
    Example:  lmwright models
    """
    from lmwright.presets.table import models_command

    return models_command()


@click.command()
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
    from lmwright.formats.open import params_command

    return params_command(name, list(overrides))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def doctor(as_json: bool) -> Any:
    """Show versions, devices and extras, and what is wrong.

    For a first look at a machine or a bug report, with memory and disk. The exit code is 1 if a TPU
    or a card is not used, or the disk is full. No user, host name, path of the home folder or
    secret is shown.

    \b
    Example:  lmwright doctor
    """
    from lmwright.train.doctor import doctor_command

    return doctor_command(as_json=as_json)


VERBS = (config, models, params, doctor)
