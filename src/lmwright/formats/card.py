"""Cards: README.md of an export or an adapter, with the facts of the run and no adjectives."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jinja2

import lmwright
from lmwright.config.fields import names_of
from lmwright.config.run import PLACE
from lmwright.core.contract import HfModel
from lmwright.core.param import count_params
from lmwright.errors import UserError
from lmwright.formats.card_citation import citation, with_address
from lmwright.formats.card_license import CARRIED, carried_text, license_of
from lmwright.formats.card_use import USE
from lmwright.guard.terminal import visible
from lmwright.models.hf.answerer import TASK
from lmwright.models.over import OverEncoder
from lmwright.storage.hub import PREFIX, is_hub_name

if TYPE_CHECKING:
    from lmwright.formats.proof import Proof
    from lmwright.report.read import RunRecord

Rows = tuple[dict[str, Any], ...]
SECTIONS = ("objective.", "optim.", "lora.", "train.", "data.pack.", "data.tokenizer.", "seed")
DATASETS = f"{PREFIX}datasets/"


@dataclass(frozen=True)
class Facts:
    """Facts about the origin of a model; empty fields are left out of the card."""

    name: str
    origin: str = ""
    """Origin of the model in one sentence."""
    sources: Rows = ()
    """One row a data source: `source`, `use` and counts such as documents, tokens, bytes."""
    results: Rows = ()
    """One row a held-out source: `source`, loss, ppl, bits_per_byte."""
    training: dict[str, str] | None = None
    """Label to text: steps, tokens seen, time, machine."""
    settings: dict[str, Any] | None = None
    """Dotted field of the run to its value."""
    base: str = ""
    """Name on the hub of the model that training began with."""
    datasets: dict[str, str] = field(default_factory=dict)
    """Data source to the name on the hub of the dataset that it is."""
    license: dict[str, str] = field(default_factory=dict)
    """License of the model that this one is made from: keys of its card and their values."""


UNLICENSED = (
    "License: not set. Whoever publishes this model adds `license:` above, with the data's in mind."
)

MEASURED = """\
{% if facts.results %}
## Held-out results

{{ table(facts.results) }}
{% endif %}

{% if facts.sources %}
## Data

{{ table(facts.sources) }}
{% endif %}

{% if facts.training %}
## Training

{{ pairs(facts.training) }}
{% endif %}
"""

SETTINGS = """\
{% if facts.settings %}
## Settings

{{ pairs(facts.settings) }}
{% endif %}
"""

FROM_SCRATCH = "Trained from scratch with lmwright."

CARD = (
    """\
---
library_name: {{ "sentence-transformers" if task == "sentence-similarity" else "transformers" }}
pipeline_tag: {{ task }}
tags:
- lmwright
- {{ model.kind | tojson }}
{% for key, value in facts.license.items() %}
{{ key }}: {{ value | tojson }}
{% endfor %}
---
# {{ inline(facts.name) }}

{{ inline(facts.origin) or "A language model." }} {{ "{:,}".format(params) }} parameters, \
{{ model.seq_len }} tokens of context, written in {{ dtype }} by lmwright {{ version }}.

{{ license }}

"""
    + USE
    + "\n"
    + MEASURED
    + """
## Architecture

{{ pairs(architecture) }}

"""
    + SETTINGS
    + """
## How the conversion was checked

{% for line in proof.lines() %}
- {{ inline(line) }}
{% endfor %}

Figures in `convert.json`; {{ proof.tokens }} tokens of fixed prompts, float32.

{{ cite(facts.name, facts.base) }}
"""
)


ADAPTER_CARD = (
    """\
---
library_name: peft
pipeline_tag: {{ task }}
tags:
- lmwright
- lora
---
# {{ inline(facts.name) }}

{{ "LoRA adapters" if folders[1:] else "A LoRA adapter" }} of \
[{{ base }}](https://huggingface.co/{{ base }}), written by lmwright {{ version }}.

License: {{ license }}.

## Use
```python
from peft import PeftModel
from transformers import {{ kind }}

model = {{ kind }}.from_pretrained({{ base | tojson }}{{ said }})
{% for folder in folders or [""] %}
{{ "# or " if not loop.first }}model = PeftModel.from_pretrained(model, {{ place | tojson }}\
{% if folder %}, subfolder={{ folder | tojson }}{% endif %})
{% endfor %}
```

"""
    + MEASURED
    + SETTINGS
    + "\n{{ cite(facts.name, base) }}\n"
)

ADAPTER_TASKS = {
    "CausalLM": "text-generation",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": TASK,
    "": "sentence-similarity",
}
"""The hub's task name of an adapter, by the end of the name of transformers' class."""

FILES_CARD = """\
# {{ inline(name) }}

License: {{ license }}.

{{ table(files) }}
"""


def adapter_card(
    facts: Facts,
    place: str,
    *,
    base: str,
    license: str,
    folders: tuple[str, ...] = (),
    kind: str = "CausalLM",
    head: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Card of a LoRA adapter, or of several in `folders`, of a `base` on the hub; `place` is its
    own name there, `kind` the end of the name of transformers' class (empty for one without a
    head), `head` the settings of a head that it has."""
    said = "".join(f", {name}={json.dumps(value)}" for name, value in head.items())
    values = {"base": base, "license": license, "folders": folders}
    name = f"AutoModelFor{kind}" if kind else "AutoModel"
    values |= {"kind": name, "task": ADAPTER_TASKS[kind], "said": said}
    return _render(ADAPTER_CARD, facts=facts, place=place, **values)


def files_card(name: str, license: str, files: Rows) -> str:
    """Card of files of which no more is known than their names and sizes."""
    return _render(FILES_CARD, name=name, license=license, files=files)


def published_card(text: str, place: str, license: str) -> str:
    """A `model_card` with a license, with the name on the hub where it had a folder's, and with
    the owner and the address in its citation."""
    text = with_address(text, place)
    if UNLICENSED not in text and CARRIED not in text:
        return text
    text = text.replace(UNLICENSED, f"License: {license}.")
    quoted = r'"(?:[^"\\\n]|\\.)*"'
    text = re.sub(
        rf"(from_pretrained\(|pipeline\([^,]*, model=|SentenceTransformer\(){quoted}",
        lambda match: f'{match[1]}"{place}"',
        text,
    )
    verbs = (
        r"(`lmwright (?:generate|predict|embed) )[^`]*(?= --prompt| texts\.csv| questions\.jsonl)"
    )
    return re.sub(verbs, lambda match: f"{match[1]}{PREFIX}{place}", text)


def model_card(facts: Facts, model: HfModel, proof: "Proof", dtype: str, place: str) -> str:
    """Markdown with the metadata block that the Hugging Face hub reads; `place` is the name of
    the folder that it lies in."""
    return _render(
        CARD,
        facts=facts,
        model=model,
        params=count_params(model.spec()),
        architecture={k: v for k, v in asdict(model).items() if v is not None},
        proof=proof,
        dtype=dtype,
        place=place,
        task=task_of(model),
        license=carried_text(facts.license) if facts.license else UNLICENSED,
    )


def task_of(model: HfModel) -> str:
    """The hub's name of what a model does."""
    if isinstance(model, OverEncoder):
        return model.task
    masks = model.both_ways and not model.fills_masks
    return "fill-mask" if masks else "text-generation"


def _render(template: str, **values: Any) -> str:
    env = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False)
    env.globals |= {"table": _table, "pairs": _pairs, "inline": _inline, "word": _word}
    env.globals |= {"cite": citation}
    text = env.from_string(template).render(version=lmwright.__version__, **values)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _table(rows: Rows) -> str:
    """Markdown table; columns in the order they first appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_text(row.get(name)) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _pairs(values: dict[str, Any]) -> str:
    return _table(tuple({"field": name, "value": value} for name, value in values.items()))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str):
        text = str(value)
    elif isinstance(value, int):
        text = f"{value:,}" if abs(value) >= 10_000 else str(value)
    elif isinstance(value, float):
        text = f"{value:.5g}"
    else:
        text = json.dumps(value, default=str)
    return _inline(text).replace("|", "\\|")


def _inline(text: str) -> str:
    """Text of others made safe within a line: no markup, no second line, no control characters."""
    one_line = visible(" ".join(text.split()), lines=False)
    for mark, plain in (("&", "&amp;"), ("<", "&lt;"), ("`", "\\`"), ("](", "]\\(")):
        one_line = one_line.replace(mark, plain)
    return one_line


def _word(name: str) -> str:
    """A name as one word of a shell's command, between backticks."""
    return shlex.quote(visible(" ".join(name.split()), lines=False).replace("`", "'"))


def facts_of_run(run_dir: Path, step: int | None = None) -> Facts:
    """Facts from the files of a run directory, of its end or of a checkpoint at a step; secrets
    and places on disks are left out."""
    from lmwright.report.read import read_run
    from lmwright.report.summary import summarize

    try:
        record = read_run(run_dir)
    except UserError as error:  # the weights are worth exporting all the same
        return Facts(run_dir.absolute().name, FROM_SCRATCH, training={"not known": str(error)})
    summary = summarize(record)
    wanted = ("steps", "tokens seen", "time running", "machine", "software")
    if step is not None:
        summary |= {"steps": f"{step:,}"}
        wanted = ("steps", "machine", "software")
    began = record.config.get("train.init_from")
    base = str(began).removeprefix(PREFIX).partition("@")[0] if is_hub_name(str(began)) else ""
    origin = f"Fine-tuned with lmwright{base and f' from {base}'}." if began else FROM_SCRATCH
    return Facts(
        name=record.name,
        origin=origin,
        sources=_sources(record.config.get("data.dir")),
        results=_results(record, step),
        training={label: summary[label] for label in wanted if label in summary},
        settings=_settings(record.config),
        base=base,
        datasets=_datasets(record.config),
        license=license_of(Path(str(began))) if began and not base else {},
    )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of a training run by dotted name, without places on a disk."""
    from lmwright.formats.open import RUN_FILES

    places = names_of(PLACE, RUN_FILES.kinds)
    return {
        name: value
        for name, value in config.items()
        if name.startswith(SECTIONS) and not name.startswith("objective.teacher_model.")
        if name.rpartition(".")[2] not in places or is_hub_name(str(value))
    }


def _results(record: "RunRecord", step: int | None) -> Rows:
    """The last held-out figures of each source, or those at a step or last before it."""
    rows = []
    for source, curves in record.evals.items():
        row = {"source": source}
        for name, series in curves.items():
            points = zip(series.steps, series.values, strict=True)
            values = [value for at, value in points if step is None or at <= step]
            row |= {name: values[-1]} if values else {}
        rows += [row] if len(row) > 1 else []
    return tuple(rows)


def _datasets(config: dict[str, Any]) -> dict[str, str]:
    """Data source to dataset, for the sources that are on the hub."""
    names = {}
    for key, path in config.items():
        match = re.fullmatch(r"(.*data\.sources\.\d+\.)path", key)
        if match and str(path).startswith(DATASETS):
            dataset = "/".join(str(path).removeprefix(DATASETS).partition("@")[0].split("/")[:2])
            names[str(config.get(f"{match[1]}name") or dataset.rpartition("/")[2])] = dataset
    return names


def _sources(data_dir: str | None) -> Rows:
    """Documents, tokens and bytes of each source of the prepared data, where it is at hand."""
    from lmwright.data.dropped import read_made
    from lmwright.data.manifest import add_counts
    from lmwright.data.portions import local_folders

    try:
        folders = [folder / "tokenize" for folder in local_folders(data_dir or "")]
        counts = reduce(add_counts, (read_made(f).counts["sources"] for f in folders), {})
    except (UserError, KeyError):
        return ()
    return tuple(
        {"source": source, "use": split, **numbers}
        for split, sources in sorted(counts.items(), reverse=True)
        for source, numbers in sources.items()
    )
