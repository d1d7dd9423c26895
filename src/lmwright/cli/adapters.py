"""The verbs of adapters, as commands."""

from collections.abc import Sequence
from typing import Any

import click

from lmwright.cli.shared import Dtype, InOrder, given

METHODS = (
    "linear", "cat", "svd", "ties", "dare-linear", "dare-ties", "ties-svd", "dare-linear-svd",
    "dare-ties-svd",
)  # fmt: skip


@click.group(cls=InOrder)
def adapters() -> None:
    """Export, merge and combine LoRA adapters."""


@adapters.command("export")
@click.argument("run_dir")
@click.argument("out")
@click.option("--adapter", help="Adapter to use if the run has several.")
def adapters_export(run_dir: str, out: str, **options: Any) -> None:
    """Write a run's adapter as a PEFT folder OUT.

    The adapter comes from the newest checkpoint in RUN_DIR. To write the model with the adapter
    merged in, use lmwright export.

    \b
    Example:  lmwright adapters export runs/lora my-adapter
    """
    from lmwright.formats.adapter_verbs import export_adapter_command

    export_adapter_command(run_dir, out, **given(**options))


@adapters.command("merge")
@click.argument("base")
@click.argument("adapter")
@click.argument("out")
@click.option("--dtype", type=Dtype(["bf16", "fp16", "fp32"]), help="Data type of the weights.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def adapters_merge(base: str, adapter: str, out: str, overwrite: bool, **options: Any) -> None:
    """Write the model BASE with the PEFT folder ADAPTER merged into it.

    BASE is any model that lmwright export accepts.

    \b
    Example:  lmwright adapters merge models/smollm my-adapter merged --dtype bf16
    """
    from lmwright.formats.adapter_verbs import merge_command

    merge_command(base, adapter, out, overwrite=overwrite, **given(**options))


@adapters.command("combine")
@click.argument("out")
@click.argument("folders", nargs=-1, required=True, metavar="ADAPTER...")
@click.option(
    "--weight",
    "weights",
    type=float,
    multiple=True,
    help="Weight of each adapter, in order; default: equal ones that add up to 1.",
)
@click.option("--method", type=click.Choice(METHODS), help="How to combine; default: svd.")
@click.option(
    "--density", type=click.FloatRange(0, 1), help="Fraction of values that ties and dare keep."
)
@click.option("--rank", type=click.IntRange(min=1), help="Rank of an svd result.")
@click.option("--sign", type=click.Choice(["total", "frequency"]), help="How ties picks signs.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed for what dare drops.")
def adapters_combine(out: str, folders: Sequence[str], **options: Any) -> None:
    """Combine several PEFT folders for the same base into one folder OUT.

    \b
    Example:  lmwright adapters combine both one two --method ties --density 0.5
    """
    from lmwright.formats.adapter_verbs import combine_command

    combine_command(out, folders, **given(**options))
