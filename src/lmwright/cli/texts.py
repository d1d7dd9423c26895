"""The verbs that give texts or read them: generate, chat, predict, embed."""

from collections.abc import Sequence
from typing import Any

import click

from lmwright.cli.shared import (
    Text,
    computed,
    flag_of,
    given,
    in_options,
    of_model,
    sampled,
)
from lmwright.errors import UserError


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--prompt", "prompts", type=Text(), multiple=True, help="Prompt; may be repeated.")
@click.option(
    "--prompts", "file", metavar="FILE", help="Continue the prompts of a file, one in each row."
)
@click.option("--out", metavar="OUT.jsonl", help="File to write; default: the terminal.")
@click.option(
    "--prompt-column", help="Column of --prompts; default: prompt, or messages in a --chat."
)
@click.option("--id-column", help="Column that identifies a row; default: file and row number.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--chat", is_flag=True, help="Each prompt is a user's message, in the model's chat template."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Most new tokens; default: 128.")
@sampled
@of_model
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    help="Diffusion: tokens of a block, filled in before the next; default: all.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Diffusion: passes for each block; default: one for each token.",
)
@click.option(
    "--first",
    type=click.Choice(["surest", "random"]),
    help="Diffusion: which predictions stay first; default: surest.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    help="Diffusion: all predictions above this probability stay; default: none.",
)
@click.option(
    "--guidance",
    type=click.FloatRange(min=0),
    help="Diffusion: weight of the difference that the prompt makes; default: 0.",
)
@click.option(
    "--sees",
    type=click.Choice(["text", "prefix", "blocks"]),
    help="Diffusion: all of the text, or nothing behind the block; default: text.",
)
@computed
def generate(
    model: str, prompts: Sequence[str], file: str | None, chat: bool, overwrite: bool,
    **options: Any,
) -> Any:  # fmt: skip
    """Continue prompts with a trained model.

    MODEL is a run directory, a Hugging Face folder, a .gguf file or hf://owner/name. FILE is csv,
    tsv, jsonl or parquet, or txt with a prompt on each line; each row becomes a line of JSON, and
    an interrupted command goes on where it was when it is run again.

    \b
    Example:  lmwright generate quickstart/run --prompt "import os" --temperature 0.8
              lmwright generate runs/chat --chat --prompt "Who are you?"
              lmwright generate runs/chat --chat --prompts questions.jsonl --out answers.jsonl
    """
    _refuse_both(prompts, file, overwrite, options)
    try:
        if file is None:
            from lmwright.evals.prompted import generate_command

            generate_command(model, list(prompts), chat=chat, **given(**options))
            return None
        from lmwright.evals.prompts_file import write_texts_command

        return write_texts_command(model, file, chat=chat, overwrite=overwrite, **given(**options))
    except UserError as error:
        raise in_options(error, options) from None


def _refuse_both(
    prompts: Sequence[str], file: str | None, overwrite: bool, options: dict[str, Any]
) -> None:
    """Raises UsageError unless there are prompts, or a file of them and what belongs to it."""
    if (file is None) == (not prompts):
        said = "are there both; give one" if prompts else "are missing; give one of them"
        raise click.UsageError(f"--prompt and --prompts {said}")
    of_file = ("out", "prompt_column", "id_column")
    idle = next((name for name in of_file if options[name] is not None), None)
    if file is None and (idle or overwrite):
        raise click.UsageError(f"{flag_of(idle or 'overwrite')} needs --prompts")


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--system", type=Text(), help="System message before the conversation.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), help="Most tokens of an answer; default: 512."
)
@sampled
@of_model
@computed
def chat(model: str, **options: Any) -> Any:
    """Talk with a model that was trained on conversations.

    MODEL is a run directory, a Hugging Face folder, a .gguf file or hf://owner/name. Each line is a
    message; answers are printed as they are made, and see what was said before. Ctrl-C ends an
    answer, Ctrl-D the chat.

    \b
    Example:  lmwright chat runs/chat
              lmwright chat my-model --system "Answer in one sentence." --temperature 0.7
    """
    from lmwright.evals.chat import chat_command

    try:
        return chat_command(model, **given(**options))
    except UserError as error:
        raise in_options(error, options) from None


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
@of_model
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
@of_model
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


VERBS = (generate, chat, predict, embed)
