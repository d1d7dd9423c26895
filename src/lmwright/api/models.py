"""Models: measured, asked, written and compared, wherever they lie.

A model is a run, its directory, a Hugging Face folder, a .gguf file or hf://owner/name throughout;
where several calls need it, `load_model` reads it once.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmwright.api.arguments import (
    Count,
    Place,
    checked,
    checked_options,
    path_of,
    prompts_of,
    refuse_unknown,
)
from lmwright.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from lmwright.evals.chat_prompts import Chat
    from lmwright.evals.compare_answers import Comparison
    from lmwright.evals.generate import Generation
    from lmwright.evals.source_loss import SourceLoss
    from lmwright.evals.tasks import TaskScores
    from lmwright.formats.loaded import LoadedModel
    from lmwright.formats.proof import Proof
    from lmwright.formats.verify import Verdict

Precision = Literal["fp32", "bf16"]
Kernels = Literal["platform", "reference"]


@checked
def load_model(
    model: Place,
    *,
    adapter: str | None = None,
    part: str | None = None,
    devices: Count | None = 1,
    copies: bool = False,
) -> "LoadedModel":
    """A model with its weights and its tokenizer, for several calls. `adapter` or `part` chooses
    one of several that a run trains. `devices` of this machine share the weights: with None one, or
    all where one has too little memory. With `copies` each has all weights, if it has room, and
    computes texts of its own: with None all devices do. Raises UserError where no model lies
    there."""
    from lmwright.formats.load import load_model

    return load_model(path_of(model), adapter, part, devices, copies)


@checked
def evaluate(
    model: Place,
    *,
    text: Place | None = None,
    max_rows: Count | None = None,
    context: Count | None = None,
    stride: Count | None = None,
    max_chars: Count | None = None,
    samples: Count | None = None,
    adapter: str | None = None,
    devices: Count | None = 1,
    precision: Precision | None = None,
    kernels: Kernels = "platform",
) -> list["SourceLoss"]:
    """Losses of a run's newest checkpoint on its held-out data, by source, or with `text` the loss
    of any model on a text file. `context` and `stride` are in tokens of a text's windows, `devices`
    as in `load_model`.

    Raises UserError where nothing is held out, or an option has no effect.
    """
    from lmwright.evals.held_out import open_held_out
    from lmwright.evals.text import text_loss

    both: dict[str, Any] = {"samples": samples, "precision": precision, "kernels": kernels}
    windows: dict[str, Any] = {"context": context, "stride": stride, "max_chars": max_chars}
    spread = None if devices == 1 else devices
    idle = {"max_rows": max_rows} if text is not None else {**windows, "devices": spread}
    if name := next((name for name, value in idle.items() if value is not None), None):
        cure = "leave it out" if text is not None else "give text, too"
        raise UserError(f"{name}: has no effect {'with' if text else 'without'} text; {cure}")
    if text is not None:
        loaded = load_model(model, adapter=adapter, devices=devices, copies=True)
        return [text_loss(loaded, path_of(text), **windows, **both)[0]]
    opened = open_held_out(path_of(model), max_rows=max_rows, adapter=adapter, **both)
    return opened.held_out.losses(opened.weights)


@checked
def evaluate_tasks(
    model: "Place | LoadedModel",
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: Count | None = None,
    chat: bool = False,
    data: "str | PathLike[str] | None" = None,
    adapter: str | None = None,
    precision: Precision | None = None,
    kernels: Kernels = "platform",
) -> "TaskScores":
    """Scores of a model in tasks of lm-evaluation-harness (by name, or as a .yaml file) and in
    .jsonl files of questions. `shots` solved examples come before each question, `limit` is the
    number of questions of each task, and with `chat` prompts are in the model's chat template. The
    data of named tasks are read from the folder `data`, or from the hub (docs/benchmarks.md).

    Raises UserError where the harness (the extra `eval`), a task or its data is missing.
    """
    from lmwright.evals.tasks import task_scores

    return task_scores(
        _loaded(model, adapter), tasks, shots=shots, limit=limit, chat=chat, data=data,
        precision=precision, kernels=kernels,
    )  # fmt: skip


@checked
def compare_tasks(
    before: "str | PathLike[str] | TaskScores", after: "str | PathLike[str] | TaskScores"
) -> "Comparison":
    """Differences of two models in the questions that both were asked, with 95 % intervals and the
    probabilities of such differences by chance. Each is what `evaluate_tasks` gave, or a file that
    `lmwright eval --tasks --out` wrote. Raises UserError for any other file, and where the two have
    no question in common."""
    from lmwright.evals.answers import read_answers
    from lmwright.evals.compare_answers import compare_answers
    from lmwright.evals.tasks import TaskScores

    return compare_answers(
        *(
            each.details if isinstance(each, TaskScores) else read_answers(Path(path_of(each)))
            for each in (before, after)
        )
    )


@checked
def generate(
    model: "Place | LoadedModel",
    prompts: "Chat | Sequence[Chat]",
    *,
    max_new_tokens: Count = 128,
    temperature: float = 0.0,
    top_k: Count | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: bool = False,
    adapter: str | None = None,
    precision: Precision | None = None,
    kernels: Kernels = "platform",
    on_text: Callable[[int, str], None] | None = None,
    **filling: Any,
) -> list["Generation"]:
    """Continues a prompt or several, or answers them as a user's messages in a `chat`, where each
    may be a conversation: a list of messages with `role` and `content`. Each result has its `text`,
    its `tokens` and why it ended (`finish`). `on_text(number, text)` gets text as it is made;
    `filling` are settings of diffusion models (docs/diffusion.md). Raises UserError for prompts
    that leave no room in the context."""
    from lmwright.evals.fill import Filling
    from lmwright.evals.prompted import ask, kept_weights
    from lmwright.evals.sampling import Sampling

    kinds = {field.name: field.type for field in fields(Filling)}
    refuse_unknown(filling, [*kinds, *signature(generate).parameters])
    filling = checked_options(filling, kinds)
    loaded = _loaded(model, adapter)
    settings = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(stop), seed)
    asked = ask(
        loaded, prompts_of(prompts, chat=chat), settings, precision=precision,
        kernels=kernels, chat=chat, filling=filling, field="prompts",
    )  # fmt: skip
    return asked.texts(kept_weights(loaded, asked.compute), on_text)


@checked
def predict(
    model: "Place | LoadedModel",
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    threshold: float | None = None,
    adapter: str | None = None,
    precision: Precision | None = None,
    kernels: Kernels = "platform",
) -> list[dict[str, Any]]:
    """The class or number of each text, the tags of its words, or the answer to it as a question,
    as `lmwright predict` writes them. `pairs` are the second texts, or the contexts of questions.
    Raises UserError where the model does none of it."""
    from lmwright.evals.compute import row_compute, spread
    from lmwright.evals.documents import Columns
    from lmwright.evals.predict import PREDICTORS, Predictor, predict_lines, tell_of_pairs

    loaded = _loaded(model, adapter)
    form = PREDICTORS.get(type(loaded.model), Predictor)
    columns = Columns(None if pairs is None else form.pair_column or "pair")
    compute = spread(row_compute(precision, kernels), loaded.num_devices)
    predictor = form(loaded, compute, columns, threshold)
    if pairs is None and form is Predictor:
        tell_of_pairs(loaded, "pairs")
    return [
        {name: value for name, value in json.loads(line).items() if name not in ("row", "id")}
        for lines in predict_lines(predictor, _rows(texts, pairs, columns.pair), columns)
        for line in lines
    ]


def _rows(texts: Sequence[str], pairs: Sequence[str] | None, column: str | None) -> Iterator[Any]:
    from lmwright.data.sources.columns import Row

    if pairs is not None and len(pairs) != len(texts):
        raise UserError(f"pairs: {len(pairs)} for {len(texts)} texts; give one for each")
    seconds = [{}] * len(texts) if pairs is None else [{column: second} for second in pairs]
    for number, (text, meta) in enumerate(zip(texts, seconds, strict=True), 1):
        yield Row(number, text, str(number), json.dumps(meta))


@checked
def embed(
    model: "Place | LoadedModel",
    texts: Sequence[str],
    *,
    pooling: Literal["first", "mean"] | None = None,
    length: Literal["one", "any"] | None = None,
    dim: Count | None = None,
    prompt: str | None = None,
    adapter: str | None = None,
    precision: Precision | None = None,
    kernels: Kernels = "platform",
) -> "np.ndarray":
    """Vectors float32 [N, `dim`] of texts; each is cut to what the model takes. `dim` keeps the
    first numbers, `prompt` names one of the model's, which is put before each text. Raises
    UserError where the model is no encoder."""
    from lmwright.evals.compute import row_compute, spread
    from lmwright.evals.embed import Vectors, embedder_at

    loaded = _loaded(model, adapter)
    compute = spread(row_compute(precision, kernels), loaded.num_devices)
    vectors = Vectors(loaded, embedder_at(loaded, pooling, length), dim, compute, prompt)
    documents, _ = vectors.encode([vectors.prompt + text for text in texts])
    return vectors.of(documents)


@checked
def export(
    model: Place,
    out: Place,
    *,
    dtype: str | None = None,
    max_shard_bytes: Count | None = None,
    overwrite: bool = False,
    adapter: str | None = None,
    part: str | None = None,
) -> "Proof":
    """Writes a model as a Hugging Face folder or a .gguf file, an adapter merged into its base, and
    returns the proof that the files hold it. Raises UserError for what the format cannot hold."""
    from lmwright.formats.convert import export_command

    return export_command(
        path_of(model), path_of(out), dtype=dtype, max_shard_bytes=max_shard_bytes,
        overwrite=overwrite, adapter=adapter, part=part,
    )  # fmt: skip


@checked
def quantize(
    model: Place,
    out: Place,
    *,
    to: Literal["int4", "int8", "q4_0", "iq4_nl", "q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_m"]
    | None = None,
    group_size: Count | None = None,
    text: Place | None = None,
    text_column: str | None = None,
    rows: Count = 32,
    context: Count | None = None,
    method: Literal["gptq", "nearest"] = "gptq",
    adapter: str | None = None,
    max_shard_bytes: Count | None = None,
    overwrite: bool = False,
) -> "Proof":
    """Writes a model in 4 or 8 bits as a Hugging Face folder or a .gguf file, measured on `rows` of
    `context` tokens of `text`, or of what a run was trained on, and returns the proof that the
    files hold it. `group_size` inputs share a scale of int4. Raises UserError before anything is
    measured where the model or the place does not allow it."""
    from lmwright.quantize.command import quantize_command

    return quantize_command(
        path_of(model), path_of(out), to=to, group_size=group_size,
        text=None if text is None else path_of(text), text_column=text_column, rows=rows,
        context=context, method=method, adapter=adapter, max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )  # fmt: skip


@checked
def import_model(
    source: Place, out: Place, *overrides: str, dtype: str | None = None, overwrite: bool = False
) -> "Proof":
    """Reads a model of another tool and writes it to a folder; overrides such as `seq_len=131072`
    change fields that no weight depends on. Raises UserError for a missing or unexpected tensor."""
    from lmwright.formats.convert import import_command

    return import_command(
        path_of(source), path_of(out), overrides, dtype=dtype, overwrite=overwrite
    )


@checked
def verify(first: Place, second: Place, *, tolerance: float | None = None) -> "Verdict":
    """Compares two models by tensors, logits and tokenizers; `tolerance` is a difference of logits,
    relative to the largest."""
    from lmwright.formats.verify import TOLERANCE, verify

    limit = TOLERANCE if tolerance is None else tolerance
    return verify(path_of(first), path_of(second), tolerance=limit)


@checked
def export_adapter(run_dir: Place, out: Place, *, adapter: str | None = None) -> None:
    """Writes an adapter of a run's newest checkpoint as a PEFT folder."""
    from lmwright.formats.adapter_verbs import export_adapter_command

    export_adapter_command(path_of(run_dir), path_of(out), adapter=adapter)


@checked
def merge_adapter(
    base: Place, adapter: Place, out: Place, *, dtype: str | None = None, overwrite: bool = False
) -> "Proof":
    """Writes a model with a PEFT folder merged into it. Raises UserError for an adapter that was
    trained on another base."""
    from lmwright.formats.adapter_verbs import merge_command

    return merge_command(
        path_of(base), path_of(adapter), path_of(out), dtype=dtype, overwrite=overwrite
    )


@checked
def publish(
    model: Place,
    repo: str | None = None,
    *,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    languages: Sequence[str] = (),
    **options: Any,
) -> None:
    """Puts a run, a folder or a .gguf file on the Hugging Face hub. `options` are those of
    `lmwright publish` with underscores, such as `gguf=["q8_0"]`, `public=True`, `dry_run=True`; the
    token is taken from HF_TOKEN or `hf auth login`. Raises UserError before anything is sent."""
    from lmwright.publish.card import Listing
    from lmwright.publish.command import publish_command

    kinds = {n: each.annotation for n, each in signature(publish_command).parameters.items()}
    kinds |= dict.fromkeys(("license_name", "license_link"), str)
    known = [*signature(publish).parameters, *kinds]
    refuse_unknown(options, [n for n in known if n not in ("options", "listing", "path")])
    options = checked_options(options, kinds)
    names = {name: options.pop(name, None) for name in ("license_name", "license_link")}
    listing = Listing(
        license=license, base_model=base_model, datasets=tuple(datasets),
        languages=tuple(languages), **names,
    )  # fmt: skip
    publish_command(path_of(model), repo, listing=listing, **options)


def _loaded(model: "Place | LoadedModel", adapter: str | None) -> "LoadedModel":
    from lmwright.formats.loaded import LoadedModel

    if not isinstance(model, LoadedModel):
        return load_model(model, adapter=adapter)
    if adapter is not None:
        raise UserError("adapter: the model is loaded already; give it to load_model")
    return model
