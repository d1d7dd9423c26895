"""Notebook: the same session as at Kaggle, to be opened in Kaggle's or Colab's editor.

It carries this very lmwright and the run file; packages come from the package index. Prepared data
and weights of this machine are written beside it, to be attached.
"""

import base64
import json
from pathlib import Path
from typing import Any

from lmwright.cloud.kaggle import kernel
from lmwright.cloud.kaggle.launch import settings
from lmwright.cloud.kaggle.parcel import WHEELS, Parcel, pack
from lmwright.cloud.kaggle.push import SETTINGS_LINE
from lmwright.cloud.spec import Limits
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.guard.temporary import temporary_folder, write_output

CARRIED = "lmwright-input"
DRIVE = "/content/drive/MyDrive/lmwright"
HOURS = 9.0
WIDTH = 100
INTRODUCTION = """# {job}

Trains `{job}` with lmwright on the TPU of this notebook, in an environment of its own.

1. Choose a TPU: in Kaggle under Settings, Accelerator; in Colab under Runtime, Change runtime type.
   In Kaggle, also turn the internet on.
2. {attach}
3. Run all cells. What was trained lies in {outputs} as `run-{job}-N.lmw` when a session is over;
   a notebook that finds such a file goes on from it. In Kaggle, attach the output of the last
   version; in Colab, Drive keeps it.
"""
ATTACH = (
    "Attach {names}, which lies beside this file: in Kaggle as a private dataset, in Colab in the "
    "folder `lmwright` of your Drive."
)
PLACES = """\
import os

if os.path.exists("/content") and not os.path.exists("/kaggle"):
    from google.colab import drive

    drive.mount("/content/drive")
    SETTINGS["output"] = {drive!r}
elif not os.path.exists("/kaggle"):
    SETTINGS["output"] = "lmwright-output"
os.makedirs(SETTINGS["output"], exist_ok=True)
"""
GO_ON = """\
newest = 0
for root in [*SETTINGS["inputs"], SETTINGS["output"]]:
    for path in Path(root).rglob(f"run-{SETTINGS['job']}-*.lmw"):
        newest = max(newest, int(path.stem.rpartition("-")[2]))
if newest:
    name = f"run-{SETTINGS['job']}-{newest}.lmw"
    SETTINGS["archives"][name] = "run"
    SETTINGS["files"].append(name)
    SETTINGS["inputs"].append(SETTINGS["output"])
SETTINGS["session"] = newest + 1
code = main(SETTINGS)
print("exit code", code)
"""


def write_notebook(run: Run, name: str, limits: Limits, file: Path) -> list[Path]:
    """Writes the notebook, and beside it the archives that have to be attached, which are
    returned. Raises UserError for a run that cannot be sent."""
    if file.suffix != ".ipynb":
        raise UserError(f"--notebook: {file}: has to end in .ipynb")
    if not file.parent.is_dir():
        raise UserError(f"--notebook: {file.parent} is not a folder; make it first")
    with temporary_folder() as folder:
        parcel = pack(run, Path(folder))
        (code,) = (archive for archive in parcel.archives if archive.kind == "code")
        data = code.write(Path(folder, "archive")).read_bytes()
    beside = [archive.write(file.parent) for archive in parcel.archives if archive.folder]
    told = _settings(run, name, limits, parcel)
    page = json.dumps(_notebook(told, code.name, data, beside), indent=1)
    write_output(file, page + "\n")
    return beside


def _settings(run: Run, name: str, limits: Limits, parcel: Parcel) -> dict[str, Any]:
    told = settings(name, parcel, limits)
    wheels = [archive.name for archive in parcel.archives if archive.kind == WHEELS]
    for key in ("packages", "files"):
        told[key] = [entry for entry in told[key] if entry not in wheels]
    return told | {
        "devices": 0,  # whatever the notebook has
        "no_index": False,
        "inputs": [CARRIED, "/kaggle/input", DRIVE],
        "hosts": ["pypi.org", *told["hosts"]],
        "seconds": (run.limits.session_hours or HOURS) * 3600,
    }


def _notebook(told: dict[str, Any], name: str, data: bytes, beside: list[Path]) -> dict[str, Any]:
    text = Path(kernel.__file__).read_text(encoding="utf-8")
    script, _, _ = text.partition('\nif __name__ == "__main__"')
    script = script.replace(SETTINGS_LINE, "").rstrip() + "\n"
    attach = "Nothing has to be attached."
    if beside:
        names = ", ".join(f"`{path.name}`" for path in beside)
        attach = ATTACH.format(names=names)
    introduction = INTRODUCTION.format(
        job=told["job"], attach=attach, outputs="the output (Colab: in that folder of your Drive)"
    )
    chosen = (
        f"import json\n\nSETTINGS = json.loads(\n    {json.dumps(told)!r}\n)\n"
        f"SETTINGS['seconds'] = {told['seconds']:g}  # how long this session may last\n"
    )
    carried = "\n".join(_lines(base64.b64encode(data).decode()))
    unpack = (
        f"import base64\nfrom pathlib import Path\n\nPath({CARRIED!r}).mkdir(exist_ok=True)\n"
        f'Path({CARRIED!r}, {name!r}).write_bytes(base64.b64decode("""\n{carried}\n"""))\n'
    )
    cells = [
        _cell("markdown", introduction),
        _cell("code", chosen),
        _cell("code", PLACES.format(drive=DRIVE)),
        _cell("code", unpack),
        _cell("code", script),
        _cell("code", GO_ON),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"lmwright-{number}"
    kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {
        "kernelspec": kernelspec,
        "language_info": {"name": "python"},
        "accelerator": "TPU",
        "colab": {"gpuType": "V5E1"},
    }
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}


def _lines(text: str) -> list[str]:
    return [text[at : at + WIDTH] for at in range(0, len(text), WIDTH)]


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": {}, "source": source.rstrip("\n").splitlines(True)}
    return cell | ({"outputs": [], "execution_count": None} if kind == "code" else {})
