"""The verbs on data: prepare, data, tokenizer."""

from collections.abc import Sequence
from typing import Any

import click

from lmwright.cli.shared import OVERRIDES, RUN, InOrder, given, load


@click.command()
@RUN
@OVERRIDES
@click.option(
    "--stage",
    "stages",
    multiple=True,
    type=click.Choice(["normalize", "tokenizer", "tokenize", "pack", "shuffle"]),
    help="Run only this stage; may be repeated. Default: all stages.",
)
@click.option(
    "--keep",
    type=click.Choice(["all", "store"]),
    default="all",
    show_default=True,
    help="`store` drops stages before the rows as they are used up.",
)
def prepare(run: str, overrides: Sequence[str], stages: Sequence[str], keep: Any) -> Any:
    """Turn text into packed rows of tokens.

    Finished stages whose inputs have not changed are skipped; a killed one continues.

    \b
    Example:  lmwright prepare run.toml data.workers=2
              lmwright prepare run.toml --stage normalize
              lmwright prepare run.toml --keep store
    """
    from lmwright.data.prepare import prepare_command
    from lmwright.presets.sources import say_licenses

    loaded = load(run, overrides, "sweep")  # whose runs are trained on the same data
    summary = prepare_command(loaded, tuple(stages), keep)
    say_licenses(loaded.data.sources)
    return summary


@click.group(cls=InOrder)
def data() -> None:
    """Show, verify and copy prepared data."""


@data.command("verify")
@click.argument("folder")
def data_verify(folder: str) -> Any:
    """Compare every shard below FOLDER with its hash.

    \b
    Example:  lmwright data verify quickstart/data
    """
    from lmwright.data.rows.store import verify_command

    return verify_command(folder)


@data.command("push")
@click.argument("folder")
@click.argument("target")
@click.option("--project", help="Google Cloud project of the disk.")
@click.option("--zone", help="Zone of the disk, which is that of its slices.")
@click.option("--bucket", help="Folder for lmwright, as gs://BUCKET/lmwright.")
@click.option("--service-account", help="E-mail of the account of the helper VM.")
@click.option("--network", help="Network of the helper VM.")
@click.option("--subnetwork", help="Subnetwork of the helper VM.")
@click.option("--internal-ips", is_flag=True, default=None, help="Helper VM without the internet.")
@click.option("--disk-type", help="Default: pd-balanced. A v6e takes hyperdisk-ml.")
@click.option("--dry-run", is_flag=True, default=None, help="Print the requests for the disk.")
def data_push(folder: str, target: str, **options: Any) -> Any:
    """Copy prepared data to a bucket or a new disk, verified.

    TARGET is gs://BUCKET/FOLDER; what is there already is not sent again. Or it is disk:NAME: a
    disk is made, filled from a bucket by a helper VM and verified; FOLDER may be in that bucket.
    The options are for disks.

    \b
    Example:  lmwright data push data/wiki gs://my-bucket/wiki
              lmwright data push gs://my-bucket/wiki disk:wiki --zone us-central2-b
    """
    options_given = given(**options)
    if not target.startswith("disk:"):
        if options_given:
            name = next(iter(options_given)).replace("_", "-")
            raise click.UsageError(f"--{name} is for a TARGET disk:NAME; leave it out.")
        from lmwright.data.push import push_command

        return push_command(folder, target)
    from lmwright.cloud.fill import push_disk_command
    from lmwright.cloud.target import settings_with

    kind, dry_run = (
        options_given.pop("disk_type", "pd-balanced"),
        options_given.pop("dry_run", False),
    )
    return push_disk_command(folder, target, settings_with(**options_given), kind, dry_run=dry_run)


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

    data = load(run, overrides).data
    return show_sources(data, start, count) if sources else show_command(data.dir, start, count)


@click.group(cls=InOrder)
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

    return prepare_command(load(run, overrides), ("normalize", "tokenizer"))


@tokenizer.command("import")
@click.argument("path")
@click.argument("out")
def tokenizer_import(path: str, out: str) -> None:
    """Read a tokenizer at PATH and write it to the new folder OUT.

    PATH is a tokenizer.json or its folder, a folder with vocab.json and merges.txt or with
    BERT's vocab.txt, a tokenizer.model of sentencepiece, a .tiktoken file or hf://owner/name.

    \b
    Example:  lmwright tokenizer import downloads/gpt2 tokenizers/gpt2
    """
    from lmwright.data.tokens.tokenizer_formats import import_command

    tokenizer = import_command(path, out)
    click.echo(f"{out}: {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint}")


VERBS = (prepare, data, tokenizer)
