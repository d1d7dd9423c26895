"""The verbs on models: eval, generate, chat, predict, embed, export, quantize, import, verify,
vocab, grow.

MODEL is a run directory, a Hugging Face folder, a .gguf file or hf://owner/name throughout.
"""

from collections.abc import Sequence
from typing import Any

import click

from lmwright.cli import texts
from lmwright.cli.shared import (
    OF_QUANTIZE,
    Dtype,
    Numbers,
    computed,
    flag_of,
    given,
    of_model,
    refuse_beside_tasks,
    with_tasks,
)
from lmwright.errors import UserError


@click.command("eval")
@click.argument("model", metavar="MODEL")
@click.option(
    "--max-rows",
    type=click.IntRange(min=1),
    help="Rows to evaluate per held-out source, evenly spaced; default: all.",
)
@click.option("--text", metavar="FILE", help="Evaluate on this text file instead of held-out data.")
@click.option(
    "--context",
    type=click.IntRange(min=2),
    help="Tokens in a window of --text; default: 1024, or the model's context if shorter.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    help="Tokens between windows of --text; default: --context, without overlap.",
)
@click.option(
    "--max-chars",
    type=click.IntRange(min=1),
    help="Evaluate only the beginning of --text; default: all.",
)
@click.option("--by-position", is_flag=True, help="Loss by the number of tokens before.")
@click.option("--needle", is_flag=True, help="Hide numbers in long texts and ask for them.")
@click.option(
    "--lengths",
    type=Numbers(int, 1),
    help="Tokens of the texts of --needle; default: the context, its half, quarter and eighth.",
)
@click.option(
    "--depths",
    type=Numbers(float, 0, 100),
    help="Where numbers are hidden, in percent of the text; default: 0,25,50,75,100.",
)
@click.option(
    "--tries", type=click.IntRange(min=1), help="Numbers of each length and depth; default: 4."
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the numbers; default: 0.")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Diffusion: how many times each row is masked; default: objective.eval_samples.",
)
@with_tasks
@of_model
@computed
def evaluate(model: str, by_position: bool, needle: bool, **options: Any) -> Any:
    """Measure loss and perplexity, or answer benchmarks.

    Evaluates the newest checkpoint of a run on its held-out data, per source. With --text,
    evaluates any model on a text file: a run directory, a Hugging Face folder, a .gguf file or
    hf://owner/name. --tasks answers benchmarks with any model. --by-position and --needle measure
    what a long context is worth; in a run directory they are kept for its report.

    \b
    Example:  lmwright eval quickstart/run --max-rows 100
              lmwright eval my-model.gguf --text README.md --context 256
              lmwright eval runs/long --needle --lengths 8192,32768 --depths 0,50,100
              lmwright eval quickstart/run --tasks arc_easy,questions.jsonl --limit 200
    """
    options = given(**options)
    _refuse_idle(options, by_position, needle)
    if "tasks" in options or "against" in options:
        from lmwright.evals.tasks_command import eval_tasks_command

        return eval_tasks_command(model, **options)
    if needle:
        from lmwright.evals.long_context import needle_command

        return needle_command(model, **options)
    if by_position:
        from lmwright.evals.long_context import positions_command

        return positions_command(model, **options)
    if "text" in options:
        from lmwright.evals.text import eval_text_command

        return eval_text_command(model, **options)
    from lmwright.evals.held_out import eval_command

    return eval_command(model, **options)


NEEDLE_ALONE = ("lengths", "depths", "tries", "seed")
WINDOWS = ("context", "stride", "max_chars")


def _refuse_idle(options: dict[str, Any], by_position: bool, needle: bool) -> None:
    """Raises UsageError for an option of `eval` that would have no effect."""
    if by_position and needle:
        raise click.UsageError("--by-position and --needle are two commands; give one at a time")
    refuse_beside_tasks(options, by_position, needle)
    for name in options:
        if name in NEEDLE_ALONE and not needle:
            raise click.UsageError(f"{flag_of(name)} needs --needle")
        if name in WINDOWS and "text" not in options:
            raise click.UsageError(f"{flag_of(name)} needs --text")
        if needle and name in ("context", "stride"):
            raise click.UsageError(f"{flag_of(name)} has no effect on --needle; use --lengths")
        if name == "samples" and (needle or by_position):
            raise click.UsageError("--samples is for losses of whole texts; leave it out here")
        if name == "max_rows" and (needle or "text" in options):
            raise click.UsageError(
                "--max-rows is for losses on held-out data; use --max-chars with --text"
            )


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("out")
@click.option(
    "--dtype",
    type=Dtype(
        [
            "bf16",
            "fp16",
            "fp32",
            "q8_0",
            "ternary",
            "ternary-bf16",
            "tq1_0",
            "tq2_0",
            "q4_0",
            "int4",
            "int8",
        ]
    ),
    help="Data type of the written weights; default: unchanged. q8_0 and tq are for GGUF; ternary "
    "packs those of a BitNet; q4_0, int4 and int8 those of a run with [qat].",
)
@click.option("--max-shard-bytes", type=click.IntRange(min=1), help="Maximum size of one file.")
@click.option("--adapter", help="Adapter to use if the run has several.")
@click.option(
    "--part",
    type=click.Choice(["discriminator", "generator"]),
    help="Model to write of a run with objective.kind = 'rtd'; default: discriminator.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def export(model: str, out: str, overwrite: bool, **options: Any) -> None:
    """Write a model as a Hugging Face folder or a .gguf file OUT.

    MODEL is a run directory (its newest checkpoint), a Hugging Face folder, a .gguf file or
    hf://owner/name. An adapter (LoRA) is merged into its base.

    \b
    Example:  lmwright export quickstart/run my-model --dtype bf16 --overwrite
              lmwright export quickstart/run my-model.gguf --dtype q8_0
    """
    from lmwright.formats.convert import export_command

    export_command(model, out, overwrite=overwrite, **given(**options))


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("out")
@click.option(
    "--to",
    type=click.Choice(["int4", "int8", *OF_QUANTIZE], case_sensitive=False),
    help="Integers: int4 or int8 in a folder; in a .gguf file q4_0, iq4_nl or q4_k (4 bits), q5_k "
    "or q6_k, or llama.cpp's mixes of these, q4_k_m and q5_k_m. Default: int4, or q4_0 for a .gguf "
    "file.",
)
@click.option(
    "--group-size",
    type=click.IntRange(min=1),
    help="Inputs that share a scale of int4; default: 32.",
)
@click.option(
    "--text",
    metavar="FILE",
    help="Text like that which the model is for, to measure it on: txt, jsonl, csv, tsv or "
    "parquet; default: what a run was trained on.",
)
@click.option("--text-column", help="Column of --text that holds the text; default: text.")
@click.option("--rows", type=click.IntRange(min=1), help="Rows to measure on; default: 32.")
@click.option(
    "--context",
    type=click.IntRange(min=2),
    help="Tokens in a row; default: 1024, or the model's context if shorter.",
)
@click.option(
    "--method",
    type=click.Choice(["gptq", "nearest"]),
    help="gptq (default) makes up for each rounding by the weights that come after it; nearest "
    "rounds each weight by itself.",
)
@click.option("--adapter", help="Adapter to use if the run has several.")
@click.option("--max-shard-bytes", type=click.IntRange(min=1), help="Maximum size of one file.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def quantize(model: str, out: str, overwrite: bool, **options: Any) -> None:
    """Write a model in 4 or 8 bits as OUT, a folder or a .gguf file.

    The matrices of its layers become integers by GPTQ, on text that is like what the model is
    for. Prints how far the result is from the floats. MODEL is a run directory, a Hugging Face
    folder, a .gguf file or hf://owner/name.

    \b
    Example:  lmwright quantize quickstart/run small.gguf
              lmwright quantize my-model my-model-int4 --text texts.jsonl
              lmwright quantize hf://owner/name int8 --to int8 --text chats.parquet --rows 128
    """
    from lmwright.quantize.command import quantize_command

    quantize_command(model, out, overwrite=overwrite, **given(**options))


@click.command("import")
@click.argument("source")
@click.argument("out")
@click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
@click.option(
    "--dtype", type=Dtype(["bf16", "fp16", "fp32"]), help="Data type of the written weights."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--model", help="SOURCE is a checkpoint of MaxText, of this preset, run or model.")
@click.option("--tokenizer", help="With --model: the tokenizer's path or hub name.")
@click.option(
    "--tied-logits",
    type=click.Choice(["divided", "plain"]),
    help="With --model: whether a tied head's logits were divided (normalize_embedding_logits).",
)
def import_(
    source: str,
    out: str,
    overrides: Sequence[str],
    overwrite: bool,
    dtype: str | None,
    model: str | None,
    **of_maxtext: str | None,
) -> None:
    """Read a model of another tool and write it to OUT.

    SOURCE is a Hugging Face folder, a .gguf file, hf://owner/name, or with --model a checkpoint of
    MaxText (99999/items, also gs://). Every tensor is checked; a missing or unexpected one is an
    error. Overrides change fields that no weight depends on, for example to allow longer rows.

    \b
    Example:  lmwright import downloads/SmolLM2-135M smollm
              lmwright import downloads/SmolLM2-135M.Q4_1.gguf smollm --dtype bf16
              lmwright import mistral long seq_len=131072 rope_theta=5e6
              lmwright import gs://b/run/checkpoints/99999 kisoku --model kisoku-3b head=untied
    """
    from lmwright.formats.convert import import_command, import_maxtext_command

    if model is not None:
        options = given(dtype=dtype, **of_maxtext)
        import_maxtext_command(source, out, model, overrides, overwrite=overwrite, **options)
        return
    if unused := next((name for name, value in of_maxtext.items() if value is not None), None):
        raise UserError(f"{flag_of(unused)}: needs --model, the model of a checkpoint")
    import_command(source, out, overrides, overwrite=overwrite, **given(dtype=dtype))


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Allowed difference of logits, relative to the largest.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def verify(first: str, second: str, as_json: bool, **options: Any) -> Any:
    """Compare two models (exit code 0 if equal, 1 if not).

    A and B are run directories, Hugging Face folders, .gguf files or hf://owner/name. The
    comparison covers tensors by name, logits on fixed prompts, and the tokenizers.

    \b
    Example:  lmwright verify quickstart/run my-model
              lmwright verify my-model my-model.gguf --tolerance 0.05
    """
    from lmwright.formats.verify import verify_command

    return verify_command(first, second, as_json=as_json, **given(**options))


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("out")
@click.option(
    "--add", "tokens", multiple=True, metavar="TOKEN", help="Token to add; may be repeated."
)
@click.option("--add-file", metavar="FILE", help="File with one token per line.")
@click.option(
    "--add-from", metavar="TOKENIZER", help="Tokenizer whose additional tokens are added."
)
@click.option(
    "--max-new", type=click.IntRange(min=1), help="Add at most this many tokens of --add-from."
)
@click.option(
    "--special", is_flag=True, help="Make the tokens of --add and --add-file special tokens."
)
@click.option("--size", type=click.IntRange(min=1), help="Number of embedding rows.")
@click.option("--multiple", type=click.IntRange(min=1), help="Round the rows up to a multiple.")
@click.option("--dtype", type=Dtype(["bf16", "fp16", "fp32"]), help="Data type of the weights.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def vocab(model: str, out: str, special: bool, overwrite: bool, **options: Any) -> None:
    """Resize a model's vocabulary, or add tokens.

    A new token starts as the mean of the tokens that it was split into; the other rows do not
    change, and OUT has a tokenizer with the new tokens.

    \b
    Example:  lmwright vocab my-model padded --multiple 128
              lmwright vocab my-model chatty --add "<|user|>" --add "<|bot|>" --special
              lmwright vocab my-model bilingual --add-from tokenizers/yoruba --max-new 8000
    """
    from lmwright.formats.vocab import vocab_command

    vocab_command(model, out, special=special, overwrite=overwrite, **given(**options))


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("out")
@click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
@click.option("--like", metavar="PRESET", help="Preset of the same family whose sizes are taken.")
@click.option("--dtype", type=Dtype(["bf16", "fp16", "fp32"]), help="Data type of the weights.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def grow(model: str, out: str, overrides: Sequence[str], overwrite: bool, **options: Any) -> None:
    """Make a larger model out of a smaller one, to train on.

    The smaller model's weights are put in the middle of the larger ones and repeated around, and
    its layers are spread over more. Overrides and --like say the sizes. MODEL is a run directory,
    a Hugging Face folder or hf://owner/name; train.init_from takes OUT.

    \b
    Example:  lmwright grow runs/base large --like modernbert-large
              lmwright grow runs/base wider embed_dim=1024 num_heads=16 num_kv_heads=16
    """
    from lmwright.formats.grow import grow_command

    grow_command(model, out, overrides, overwrite=overwrite, **given(**options))


VERBS = (evaluate, *texts.VERBS, export, quantize, import_, verify, vocab, grow)
