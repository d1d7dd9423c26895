"""Model card: README.md of an export, with the facts of the run and no adjectives."""

import json
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

import lmwright
from lmwright.core.contract import HfModel
from lmwright.core.param import count_params
from lmwright.errors import UserError
from lmwright.guard.terminal import visible

if TYPE_CHECKING:
    from lmwright.formats.proof import Proof

Rows = tuple[dict[str, Any], ...]
SECTIONS = ("objective.", "optim.", "train.", "data.pack.", "data.tokenizer.", "seed")


@dataclass(frozen=True)
class Facts:
    """Facts about the origin of a model; empty fields are left out of the card."""

    name: str
    origin: str = ""
    """One sentence."""
    sources: Rows = ()
    """One row a data source: `source`, `use` and counts such as documents, tokens, bytes."""
    results: Rows = ()
    """One row a held-out source: `source`, loss, ppl, bits_per_byte."""
    training: dict[str, str] | None = None
    """Label to text: steps, tokens seen, time, machine."""
    settings: dict[str, Any] | None = None
    """Dotted field of the run to its value."""


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- lmwright
- {{ model.kind | tojson }}
---
# {{ inline(facts.name) }}

{{ inline(facts.origin) or "A language model." }} {{ "{:,}".format(params) }} parameters, \
{{ model.seq_len }} tokens of context, written in {{ dtype }} by lmwright {{ version }}.

License: not set. Whoever publishes this model adds `license:` above, with the data's in mind.

## Use
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ place | tojson }})
model = AutoModelForCausalLM.from_pretrained({{ place | tojson }})
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
or `lmwright generate {{ word(place) }} --prompt "Once upon a time"`.

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

## Architecture

{{ pairs(architecture) }}

{% if facts.settings %}
## Settings

{{ pairs(facts.settings) }}
{% endif %}

## How the conversion was checked

{% for line in proof.lines() %}
- {{ inline(line) }}
{% endfor %}

Figures in `convert.json`; {{ proof.tokens }} tokens of fixed prompts, float32.
"""


def model_card(facts: Facts, model: HfModel, proof: "Proof", dtype: str, place: str) -> str:
    """Markdown with the metadata block that the Hugging Face hub reads; `place` is the name of
    the folder that it lies in."""
    env = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False)
    text = env.from_string(CARD).render(
        facts=facts,
        model=model,
        params=count_params(model.spec()),
        architecture={k: v for k, v in asdict(model).items() if v is not None},
        proof=proof,
        dtype=dtype,
        version=lmwright.__version__,
        place=place,
        table=_table,
        pairs=_pairs,
        inline=_inline,
        word=_word,
    )
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
    """A text of others within a line: no markup, no second line, no control characters."""
    one_line = visible(" ".join(text.split()), lines=False)
    for mark, plain in (("&", "&amp;"), ("<", "&lt;"), ("`", "\\`"), ("](", "]\\(")):
        one_line = one_line.replace(mark, plain)
    return one_line


def _word(name: str) -> str:
    """A name as one word of a shell's command, between backticks."""
    return shlex.quote(visible(" ".join(name.split()), lines=False).replace("`", "'"))


def facts_of_run(run_dir: Path) -> Facts:
    """Facts from the files of a run directory; secrets and paths of data are left out."""
    from lmwright.report.read import read_run
    from lmwright.report.summary import summarize

    origin = "Trained from scratch with lmwright."
    try:
        record = read_run(run_dir)
    except UserError as error:  # the weights are worth exporting all the same
        return Facts(run_dir.absolute().name, origin, training={"not known": str(error)})
    results = tuple(
        {"source": source, **{name: series.values[-1] for name, series in curves.items()}}
        for source, curves in record.evals.items()
    )
    summary = summarize(record)
    wanted = ("steps", "tokens seen", "time running", "machine", "software")
    settings = {
        name: value
        for name, value in record.config.items()
        if name.startswith(SECTIONS) and not name.endswith("path")
    }
    return Facts(
        name=record.name,
        origin=origin,
        sources=_sources(record.config.get("data.dir")),
        results=results,
        training={label: summary[label] for label in wanted if label in summary},
        settings=settings,
    )


def _sources(data_dir: str | None) -> Rows:
    """Documents, tokens and bytes of each source of the prepared data, where it is at hand."""
    from lmwright.data.manifest import read_manifest

    try:
        counts = read_manifest(Path(data_dir or "") / "tokenize").counts["sources"]
    except (UserError, KeyError):
        return ()
    return tuple(
        {"source": source, "use": split, **numbers}
        for split, sources in sorted(counts.items(), reverse=True)
        for source, numbers in sources.items()
    )
