"""The part of a card that says how a model is cited, as BibTeX."""

import re
from datetime import UTC, datetime

import lmwright

HUB = "https://huggingface.co"
_OURS = re.compile(
    r"^(@misc\{[\w-]+,\n)(  title = .*\n  year = .*\n  note = \{Trained with lmwright )", re.M
)


def citation(name: str, base: str = "") -> str:
    """The section for a model of a name, with the model on the hub that it began with; author and
    address are added when it is published."""
    year = f"{datetime.now(UTC):%Y}"
    plain = " ".join(re.sub(r"[^\w .:+-]", " ", name).split()) or "model"
    key = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "model"
    note = f"Trained with lmwright {lmwright.__version__}{f', from {base}' if base else ''}"
    lines = [
        f"@misc{{{key}-{year},",
        f"  title = {{{_escaped(plain)}}},",
        f"  year = {{{year}}},",
        f"  note = {{{_escaped(note)}}},",
        "}",
    ]
    return "\n".join(["## Citation", "```bibtex", *lines, "```"])


def _escaped(text: str) -> str:
    return text.replace("_", r"\_")


def with_address(text: str, repo: str) -> str:
    """A card whose citation names the owner and the address of a repository on the hub."""
    owner = repo.partition("/")[0]
    added = f"  author = {{{owner}}},\n  url = {{{HUB}/{repo}}},\n"
    return _OURS.sub(lambda match: f"{match[1]}{added}{match[2]}", text, count=1)
