"""Run: the user's settings as frozen dataclasses; nothing derived is ever written back.

    run.toml --config.load--> Run --program.plan.resolve(topology)--> Plan

Sections that come in kinds are chosen by their `kind` key; the objective, [lora] and [qat] also
have `refuse(run)`, which `config.check` calls. The string under a field is its help.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field

from lmwright.config.registry import Kind
from lmwright.errors import UserError

T = TypeVar("T")
SETTINGS = ConfigDict(extra="forbid")  # of every section
PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

RematName = Literal["none", "dots", "gate", "mlp", "block"]
RematChoice = Literal["auto", "auto_block", RematName]
UNCHOSEN: dict[str, RematName] = {"auto": "none", "auto_block": "block"}  # where no GPU decides
OffloadName = Literal["none", "block_inputs", "attention", "products"]
ContextAttention = Literal["ring", "all_to_all"]
HeadGradient = Literal["by_chunk", "once"]
SCALED_TOGETHER = 64  # neighbors of a block's input that share a scale (`block_inputs`)

FREE = "free"
Free = Annotated[T, FREE]
"""May differ between sessions: changes nothing that is learned, or another check compares it."""

PLACE = "place"
Place = Annotated[T, PLACE]
"""A field that names a file or a folder, which is removed from what is published."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """A section of a run file: a frozen dataclass, of which pydantic takes no unknown fields."""
    cls.__pydantic_config__ = SETTINGS
    return dataclass(frozen=True, kw_only=True)(cls)


@section
class Source:
    """Source of text: its location, and the columns that hold what is needed."""

    path: Place[str]
    """File, folder, glob, fsspec URL, `hf://datasets/owner/name` or `kaggle://owner/dataset`."""
    name: str | None = None
    """Name of the source in reports and mixing; the last part of the path if unset."""
    format: Literal[
        "auto", "txt", "json", "jsonl", "csv", "tsv", "parquet", "tfrecord", "arrayrecord",
    ] = "auto"  # fmt: skip
    """`auto` goes by the file's extension, which `.gz` or `.zst` may follow."""
    rows: Literal["text", "labeled", "related", "alpaca", "prompt", "messages", "sharegpt",
                  "preference", "rated", "tagged", "answered"] = "text"  # fmt: skip
    """Kind of row: text, text with a label or related text, or example (docs/conversations.md)."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of examples that have other names, as in `columns.prompt = "question"`."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = field(default_factory=dict)
    """Speakers of a chat that have other names, as in `roles.bot = "assistant"`."""
    prompts: dict[Literal["query", "passage"], str] = field(default_factory=dict)
    """Text put before an anchor (`query`), and before what belongs to it or not (`passage`)."""
    text_column: str = "text"
    """Column, key or feature that holds the text."""
    id_column: str | None = None
    """Column that identifies a document; file and row number if unset."""
    meta_columns: tuple[str, ...] = ()
    """Columns kept beside the text, as JSON."""
    documents: Literal["file", "line", "paragraph"] = "file"
    """Unit that is one document in a `.txt` file; a paragraph ends at an empty line."""
    unlabeled: tuple[str, ...] = ()
    """Labels of rows without one, such as "-1", which are left out."""
    weight: Positive | None = None
    """Share in the mixture relative to the other weighted sources; its own size if unset."""
    min_tokens: PositiveInt | None = None
    """Shorter documents are left out; tokens around a document count."""
    max_tokens: PositiveInt | None = None
    """Longer documents are left out."""
    sample_tokens: PositiveInt | None = None
    """Tokens until which shards are read, in a random order; all of it if unset."""
    sample_seed: NonNegativeInt = 0
    """Seed of the order of `sample_tokens`."""
    use: Literal["train", "eval"] = "train"
    """`eval` keeps the whole source out of training."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset."""


@section
class Tokenizer:
    """An imported tokenizer (`path`), or one trained on the run's own sources."""

    path: Place[str | None] = None
    """tokenizer.json or its folder, vocab.json folder, tokenizer.model, .tiktoken or hf://owner/name."""
    train: Literal["bpe", "unigram"] = "bpe"
    """Kind of tokenizer that is trained when no path is given."""
    vocab_size: Free[PositiveInt | None] = None
    """Tokens of a trained vocabulary, special ones too; if unset what model and text support."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Special tokens of a trained tokenizer; the first one ends a document and pads."""
    chat_template: str | None = None
    """Jinja chat template stored with the tokenizer."""
    sample_bytes: PositiveInt = 50_000_000
    """Most text used for training, spread evenly over all parts."""


@section
class Normalize:
    """Stage 1: any input to rows of (id, text, source, meta)."""

    unicode: Literal["none", "nfc"] = "none"
    """Unicode normalization form."""
    dedup: Literal["none", "exact"] = "none"
    """`exact` keeps the first document of equal content."""
    max_bad_fraction: Fraction = 0.01
    """Fraction of bad rows above which the stage stops; fewer are quarantined and counted."""


@section
class Tokenize:
    """Stage 2: text to ids, document boundaries kept."""

    route: Literal["auto", "tiktoken", "tokenizers", "sentencepiece"] = "auto"
    """Library that encodes; `auto` takes the fastest that gives identical ids."""
    prepend: Literal["none", "bos"] = "none"
    """Token put before each document."""
    append: Literal["none", "eos"] = "eos"
    """Token put after each document."""


@section
class Chat:
    """Fine-tuning examples: how conversations are rendered, and which tokens are learned."""

    template: str = "tokenizer"
    """Chat template: the tokenizer's own; alpaca, chatml, gemma, llama2, llama3, qwen3 or zephyr; a
    Jinja file; or `none`: prompt and completion one after the other."""
    train_on: Literal["all", "last"] = "all"
    """Turns of the assistant that are learned."""
    too_long: Literal["drop", "cut-left", "cut-right"] = "drop"
    """Treatment of an example longer than a row; `cut-left` keeps its end."""
    special_text: Literal["refuse", "parse"] = "refuse"
    """Treatment of an example whose text contains a special token or a turn marker: `refuse`
    quarantines it, `parse` reads the marker as one."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = None
    """Date that templates see as today, as in "2025-01-31"; without one they find no clock."""


@section
class Pack:
    """Stage 3: documents to rows of one length."""

    method: Literal["chunk", "best-fit"] = "chunk"
    """`chunk` concatenates and cuts; `best-fit` cuts only documents longer than a row."""
    seq_len: PositiveInt | None = None
    """Tokens in a row; the model's context length if unset."""
    attention: Literal["document", "row"] = "document"
    """`document` never attends across documents; `row` sees the whole row."""


@section
class Shuffle:
    """Stage 4: the order in which training uses the rows."""

    order: Literal["virtual", "written", "none"] = "virtual"
    """`written` rewrites rows as sequential shards; `virtual` gives the same order by seed."""
    epochs: PositiveInt = 1
    """Epochs that are written out; training goes on virtually after them."""
    block_rows: PositiveInt = 4096
    """Rows that are shuffled together after the sources are mixed."""
    seed: NonNegativeInt = 0
    """Seed of the order."""


@section
class Data:
    """Data of a run, from any text to batches."""

    dir: Free[Place[str]]
    """Folder of the prepared data, one sub-folder a stage."""
    sources: tuple[Source, ...] = ()
    """Sources of the data."""
    holdout_fraction: Fraction = 0.0
    """Share of documents kept for evaluation, by their hash; above 0 some of each source."""
    workers: Free[PositiveInt | None] = None
    """Processes that prepare; all cores if unset. The output never depends on it."""
    portions: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Prepares the samples in so many pieces; training can start after the first."""
    cache_gib: Free[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = 20.0
    """Disk for copies of shards, where `dir` is a URL; 0 reads from there alone."""
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    normalize: Normalize = field(default_factory=Normalize)
    tokenize: Tokenize = field(default_factory=Tokenize)
    chat: Chat = field(default_factory=Chat)
    pack: Pack = field(default_factory=Pack)
    shuffle: Shuffle = field(default_factory=Shuffle)


@section
class Mesh:
    """Number of devices along each mesh axis; one axis may take the rest."""

    data: PositiveInt | Literal["rest"] = 1
    fsdp: PositiveInt | Literal["rest"] = "rest"
    expert: PositiveInt | Literal["rest"] = 1
    context: PositiveInt | Literal["rest"] = 1
    tensor: PositiveInt | Literal["rest"] = 1
    stage: PositiveInt | Literal["rest"] = 1

    def rest_axis(self) -> str | None:
        """The axis that takes the rest. Raises UserError if there are several."""
        rest = [name for name, size in vars(self).items() if size == "rest"]
        if len(rest) > 1:
            raise UserError(
                f"mesh.{rest[0]}: {' and '.join(rest)} are both 'rest'; give all but one a number"
            )
        return rest[0] if rest else None


@section
class Train:
    """The training loop."""

    steps: Free[PositiveInt | None] = None
    """Optimizer steps; this or `epochs`."""
    epochs: Free[Positive | None] = None
    """Passes over the prepared data, instead of `steps`."""
    global_batch_size: PositiveInt
    """Rows in one optimizer step, over all devices and microbatches."""
    num_microbatches: PositiveInt = 1
    """Pieces a batch is cut into; gradients are summed over them."""
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Activations and matmuls; weights and optimizer stay in fp32. With `fp8` activations are bf16,
    and the matrices of attention and mlps multiply in 8-bit floats."""
    remat: Free[RematChoice] = "auto"
    """What the backward pass recomputes: nothing, all but matmuls, these and the mlp's gate,
    these and all the mlp's wide matmuls, whole blocks. A GPU's memory decides for `auto`, which is
    `none` elsewhere, and for `auto_block`, which is `block`."""
    offload: Free[OffloadName] = "none"
    """What the backward pass reads from the host's memory rather than computing it again: the
    inputs of blocks, these and attention's queries, keys, values and outputs, or all matmuls."""
    block_inputs: Literal["exact", "int12", "int8"] = "exact"
    """How the inputs of blocks are kept for the backward pass: as they are, as 12-bit integers or
    as 8-bit integers beside 8 exact channels. The last two change gradients a little."""
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens of each row whose logits a device has at once."""
    head_gradient: Free[HeadGradient] = "by_chunk"
    """When devices add up the gradient of the head: after each of these chunks, or once a step:
    faster on long rows, in float32 memory of the whole head on each."""
    mlp_chunk_tokens: Free[PositiveInt | None] = None
    """Tokens of each row that an mlp takes at a time; the whole row if unset."""
    context_attention: Free[ContextAttention] = "ring"
    """Attention over `mesh.context`: a ring of keys and values, or heads traded for tokens."""
    compiler_options: dict[str, str] = field(default_factory=dict)
    """Options of XLA for the train step, on top of ours for the platform; values in quotes."""
    ema_decay: Fraction | None = None
    """Keeps an exponential moving average of the weights, used by eval and export."""
    init_from: Free[Place[str | None]] = None
    """Place of weights, model and tokenizer: of a run, Hugging Face, GGUF or MaxText; or fresh."""
    init_parts: Free[tuple[str, ...]] = ()
    """Weights that are taken from there, as in ["embed"]; all if empty. Others start fresh."""
    max_skipped_steps: Free[PositiveInt] = 20
    """Steps in a row, skipped as not finite, after which the run ends (exit code 46)."""
    skip_spikes: Free[Literal["none", "skip", "rollback"]] = "none"
    """A step whose loss or gradient norm is far above those of the last 128 is skipped like one
    that is not finite; `rollback` also goes back to the weights of a checkpoint."""
    check_every_steps: Free[PositiveInt | None] = None
    """Steps between checks for silent corruption on devices (exit code 47); none if unset."""
    publish_every_steps: Free[PositiveInt | None] = None
    """Steps between checkpoints that are published as `publish` says; never if unset."""

    @property
    def activations(self) -> Literal["fp32", "bf16"]:
        """Precision of the activations."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def fixed_remat(self) -> RematName:
        """`remat`, or what it is where no GPU decides."""
        return UNCHOSEN.get(self.remat) or cast(RematName, self.remat)


@section
class Eval:
    """Held-out loss during and after training."""

    every_steps: PositiveInt | None = None
    """Steps between evaluations; only at the end if unset."""
    first: Literal["none", "start"] = "none"
    """`start` also evaluates before the first step."""
    max_rows: PositiveInt | None = 512
    """Rows per source at most, spread evenly over it."""
    prompts: tuple[str, ...] = ()
    """Continued greedily after each evaluation; kept in the report."""
    prompt_format: Literal["text", "chat"] = "text"
    """`chat` asks each prompt as a user would, by the tokenizer's chat template."""
    sample_tokens: PositiveInt = 64
    """Length of those samples."""


@section
class Checkpoint:
    """When checkpoints are saved and which are kept."""

    save_every_steps: PositiveInt = 100
    keep_last: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints at multiples of this are kept for good."""
    memory_every_steps: PositiveInt | None = None
    """Steps between copies to the host's memory (/dev/shm), which survive a process that dies."""


@section
class Limits:
    """Machine time: hours of one session and of all sessions together."""

    session_hours: Positive | None = None
    """Hours of one session; the run saves and stops before they are over (exit code 43)."""
    total_hours: Positive | None = None
    """Hours of all sessions together (exit code 44)."""
    margin_minutes: NonNegative = 10.0
    """Kept free at the end of both."""


@section
class Metrics:
    """Metrics and trackers; `metrics.jsonl` is always written."""

    log_every_steps: PositiveInt = 10
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    project: str = "lmwright"
    """Project name at wandb and trackio."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step of which a profile is kept in the run directory's `profile/`."""


@section
class Publish:
    """Destination of `lmwright publish` and `train.publish_every_steps` on the Hugging Face hub."""

    repo: str
    """`owner/name`; made if it is not there."""
    license: str
    """License identifier on the hub, such as `apache-2.0`."""
    visibility: Literal["private", "public"] = "private"


@section
class Planning:
    """Settings of `lmwright plan` and of rehearsals; training reads none of them."""

    on: str | None = None
    """Machine of the run, as in `v4-32`: planned without --on, and the least for a rehearsal."""
    prices: dict[str, NonNegative] = field(default_factory=dict)
    """USD per chip-hour by kind of chip, as in `prices.v4 = 1.1`, before the list prices."""


@section
class Run:
    """One complete run, stored with every checkpoint."""

    name: Free[str]
    dir: Free[Place[str]]
    """Run directory: run.toml plan.json env.json metrics.jsonl checkpoints/ report.html."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    model: Annotated[Any, Kind("model")]
    objective: Annotated[Any, Kind("objective")]
    optim: Annotated[Any, Kind("optim")]
    data: Data
    train: Train
    lora: Annotated[Any, Kind("lora")] | None = None
    """Trains adapters beside a frozen base; all weights are trained if unset."""
    qat: Annotated[Any, Kind("qat")] | None = None
    """Trains weights that compute rounded, as they will be stored in few bits."""
    mesh: Free[Mesh] = field(default_factory=Mesh)
    eval: Free[Eval] = field(default_factory=Eval)
    checkpoint: Free[Checkpoint] = field(default_factory=Checkpoint)
    metrics: Free[Metrics] = field(default_factory=Metrics)
    limits: Free[Limits] = field(default_factory=Limits)
    publish: Free[Publish | None] = None
    plan: Free[Planning] = field(default_factory=Planning)


def seq_len_of(run: Run) -> int:
    """Tokens in a training row."""
    return run.data.pack.seq_len or run.model.seq_len
