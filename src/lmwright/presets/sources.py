"""Sources of data by name: `[[data.sources]] preset = "dclm"`.

Where a dataset lies, its columns, its license and whether its terms have to be accepted first, by
the pages of the Hugging Face hub (2026-11). Fields beside the preset take precedence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmwright.config.run import Source

HUB = "hf://datasets/"


@dataclass(frozen=True)
class SourcePreset:
    """A dataset on the hub."""

    about: str
    license: str
    """Identifier on the hub; `other` where the page has its own terms."""
    fields: Mapping[str, Any]
    """Fields of `config.run.Source`, without its name."""
    gated: bool = False
    """True if its terms have to be accepted on its page, with the account of HF_TOKEN."""

    @property
    def page(self) -> str:
        """Address of its page."""
        repo = self.fields["path"].removeprefix(HUB)
        return f"https://huggingface.co/datasets/{repo}"

    @property
    def line(self) -> str:
        """Facts for a list."""
        gate = ", gated" if self.gated else ""
        return f"{self.about} ({self.license}{gate}) {self.page}"


def _of(repo: str, about: str, license: str, *, gated: bool = False, **fields: Any) -> SourcePreset:
    return SourcePreset(about, license, {"path": f"{HUB}{repo}", **fields}, gated)


SOURCES: dict[str, SourcePreset] = {
    "dclm": _of(
        "mlfoundations/dclm-baseline-1.0-parquet", "DCLM's filtered web pages in English",
        "cc-by-4.0", text_column="text",
    ),
    "fineweb-edu": _of(
        "HuggingFaceFW/fineweb-edu", "web pages rated as educational", "odc-by",
        text_column="text",
    ),
    "the-stack": _of(
        "bigcode/the-stack-dedup", "source code in 358 languages, near-duplicates removed",
        "other", gated=True, text_column="content",
    ),
    "arxiv": _of(
        "common-pile/arxiv_papers_filtered", "papers of arXiv under open licenses", "other",
        text_column="text",
    ),
    "pubmed": _of(
        "common-pile/pubmed_filtered", "papers of PubMed Central under open licenses", "other",
        text_column="text",
    ),
    "wikipedia": _of(
        "wikimedia/wikipedia", "English Wikipedia of November 2023", "cc-by-sa-3.0",
        subset="20231101.en", text_column="text",
    ),
    "alpaca": _of(
        "tatsu-lab/alpaca", "52,000 instructions by GPT-3.5", "cc-by-nc-4.0", rows="alpaca",
    ),
    "codealpaca": _of(
        "sahil2801/CodeAlpaca-20k", "20,000 instructions about code", "cc-by-4.0", rows="alpaca",
    ),
    "ultrachat": _of(
        "HuggingFaceH4/ultrachat_200k", "200,000 dialogues", "mit",
        rows="messages", split="train_sft",
    ),
    "gsm8k": _of(
        "openai/gsm8k", "word problems of school mathematics", "mit", rows="prompt",
        subset="main", columns={"prompt": "question", "completion": "answer"},
    ),
}  # fmt: skip
"""Presets of sources by name."""


def source_fields() -> dict[str, dict[str, Any]]:
    """Fields of each preset, as a run file would give them."""
    return {name: {"name": name, **preset.fields} for name, preset in SOURCES.items()}


def preset_of(path: str) -> SourcePreset | None:
    """The preset of a source's path, whatever its revision; None for another one."""
    repo = path.partition("@")[0]
    return next((each for each in SOURCES.values() if each.fields["path"] == repo), None)


def say_licenses(sources: Sequence[Source]) -> None:
    """Prints the license of each source that a preset names."""
    for source in sources:
        if preset := preset_of(source.path):
            print(f"license of {source.name}: {preset.license}, see {preset.page}")
