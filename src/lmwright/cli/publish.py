"""publish, as a command."""

import sys
from collections.abc import Sequence

import click

from lmwright.cli.shared import Dtype, given


@click.command()
@click.argument("path", metavar="RUN|FOLDER")
@click.argument("repo", required=False, metavar="[OWNER/NAME]")
@click.option("--license", metavar="ID", help="License as the hub calls it, such as apache-2.0.")
@click.option("--license-name", metavar="NAME", help="Name of the license, with --license other.")
@click.option("--license-link", metavar="URL", help="Text of the license, with --license other.")
@click.option("--public", is_flag=True, help="Make the repository public; default: private.")
@click.option(
    "--gguf",
    type=Dtype(["bf16", "fp16", "fp32", "q8_0"]),
    multiple=True,
    help="Also a GGUF file of this type; may be repeated.",
)
@click.option(
    "--checkpoints", metavar="all|N,N", help="Also these checkpoints, as branches step-N."
)
@click.option("--revision", metavar="BRANCH", help="Branch to publish to; default: main.")
@click.option("--base-model", metavar="OWNER/NAME", help="Base model's name on the hub.")
@click.option(
    "--dataset",
    "datasets",
    metavar="OWNER/NAME",
    multiple=True,
    help="Dataset that it was trained on, on the hub; may be repeated.",
)
@click.option(
    "--language",
    "languages",
    metavar="CODE",
    multiple=True,
    help="Language, such as en; repeatable.",
)
@click.option("--adapter", help="Only this adapter, if the run has several.")
@click.option(
    "--dtype",
    type=Dtype(["bf16", "fp16", "fp32"]),
    help="Data type of a run's weights; default: unchanged.",
)
@click.option(
    "--overwrite", is_flag=True, help="Publish even if the newest commit is not lmwright's."
)
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
def publish(
    path: str,
    repo: str | None,
    license: str | None,
    license_name: str | None,
    license_link: str | None,
    base_model: str | None,
    datasets: Sequence[str],
    languages: Sequence[str],
    **options: object,
) -> None:
    """Publish a run, folder or .gguf file on the Hugging Face hub.

    A run directory is exported first: model, tokenizer and card, or its LoRA adapters. A Hugging
    Face folder, an adapter folder, a .gguf file or a folder of these is sent as it is, with the
    card's metadata completed. The token is taken from HF_TOKEN or `hf auth login`.

    \b
    Example:  lmwright publish quickstart/run me/tiny --license apache-2.0 --dry-run
              lmwright publish quickstart/run me/tiny --license apache-2.0 --gguf q8_0
    """
    from lmwright.publish.card import Listing
    from lmwright.publish.command import publish_command

    listing = Listing(
        license=license,
        license_name=license_name,
        license_link=license_link,
        base_model=base_model,
        datasets=tuple(datasets),
        languages=tuple(languages),
    )
    ask = _ask_license if sys.stdin.isatty() else None
    publish_command(path, repo, listing=listing, ask_license=ask, **given(**options))


def _ask_license() -> str:
    return click.prompt("License (as the hub calls it)", default="apache-2.0")
