"""Steps: what `plan` has compiled here goes with the job, so that the slice need not compile it.

    ~/.cache/lmwright/steps --launch--> JOB/steps --host--> ~/.cache/lmwright/steps

`train` takes a step only if it fits the program, the chips and the versions there; see
`program.executable`.
"""

from pathlib import Path

from lmwright.guard.private import make_private
from lmwright.program.cache import cache_folder
from lmwright.program.kept import Made
from lmwright.storage.bucket import Bucket

FOLDER = "steps"
MOST = 4
PRIVATE = 0o600


def kept_steps(run_name: str) -> list[Path]:
    """Files of the newest steps that `plan` has kept for a run."""
    notes = []
    for note in (cache_folder().parent / FOLDER).glob("*.json"):
        made = Made.read(note)
        if made is not None and made.run == run_name and note.with_suffix("").exists():
            notes.append(note)
    notes.sort(key=lambda note: note.stat().st_mtime, reverse=True)
    return [path for note in notes[:MOST] for path in (note.with_suffix(""), note)]


def send_steps(run_name: str, bucket: Bucket) -> None:
    """Puts the steps of a run into its job."""
    for path in kept_steps(run_name):
        bucket.upload(path, f"{FOLDER}/{path.name}")


def receive_steps(bucket: Bucket) -> None:
    """Puts the steps of a job where `train` looks for them."""
    folder = cache_folder().parent / FOLDER
    names = bucket.entries(FOLDER)
    if not names or make_private(folder):
        return
    for name in names:
        path = folder / Path(name).name
        bucket.download(name, path)
        path.chmod(PRIVATE)
