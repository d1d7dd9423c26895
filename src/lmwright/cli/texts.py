"""The verbs on files of texts: predict, embed."""

from typing import Any

import click

from lmwright.cli.shared import computed, given


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("file", metavar="FILE")
@click.option("--out", metavar="OUT.jsonl", help="File to write; default: the terminal.")
@click.option("--text-column", help="Column that holds the texts; default: text.")
@click.option("--pair-column", help="Column of the second text, or of the context.")
@click.option(
    "--label-column",
    help="Column of the class, number or answers, to compare with what is predicted.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0, max=1),
    help="Probability above which a text has a class, of any number; default: 0.5.",
)
@click.option("--id-column", help="Column that identifies a row; default: file and row number.")
@click.option("--adapter", help="Adapter to use if the run has several.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@computed
def predict(model: str, file: str, overwrite: bool, **options: Any) -> Any:
    """Give each text of a file its class, number, tags or answer.

    MODEL is a classifier, gives numbers, tags words or answers questions: a run directory or a
    Hugging Face folder. FILE is csv, tsv, jsonl or parquet, or txt with a text on each line. Each
    row becomes a line of JSON with its label and the score of each class, its number, its words
    and their tags, or its answer, whose question and context are two columns. An interrupted
    command goes on where it was when it is run again.

    \b
    Example:  lmwright predict runs/reviews new.csv --out labels.jsonl
    """
    from lmwright.evals.predict import predict_command

    return predict_command(model, file, overwrite=overwrite, **given(**options))


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("file", metavar="FILE")
@click.option(
    "--out", metavar="OUT", help="File to write, .jsonl, .npz, .npy or .parquet; default: terminal."
)
@click.option("--text-column", help="Column that holds the texts; default: text.")
@click.option("--id-column", help="Column that identifies a row; default: file and row number.")
@click.option(
    "--pooling",
    type=click.Choice(["mean", "first"]),
    help="Mean of the tokens, or the first one; default: the model's, else mean.",
)
@click.option(
    "--length",
    type=click.Choice(["one", "any"]),
    help="Scale vectors to length one, or not; default: the model's, else any.",
)
@click.option("--prompt", help="Name of a prompt put before each text; default: the model's.")
@click.option(
    "--dim", type=click.IntRange(min=1), help="Keep the first numbers of a vector; default: all."
)
@click.option("--adapter", help="Adapter to use if the run has several.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@computed
def embed(model: str, file: str, overwrite: bool, **options: Any) -> Any:
    """Give each text of a file a vector.

    MODEL is an encoder: a run directory, a Hugging Face folder or hf://owner/name. FILE is csv,
    tsv, jsonl or parquet, or txt with a text on each line. Vectors are in the order of the rows.
    An interrupted command goes on where it was when it is run again.

    \b
    Example:  lmwright embed my-embedder texts.jsonl --out vectors.npz
              lmwright embed runs/encoder texts.csv --length one --out vectors.parquet
    """
    from lmwright.evals.embed import embed_command

    return embed_command(model, file, overwrite=overwrite, **given(**options))


VERBS = (predict, embed)
