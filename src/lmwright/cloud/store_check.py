"""Prepared data of a run, looked at before anything is paid for: is it there, complete, and such
as the run trains on?

Manifests and the sizes of files are read, no rows.
"""

from collections.abc import Iterator

from lmwright.config.run import Run, seq_len_of
from lmwright.errors import UserError, first_line
from lmwright.storage.bucket import is_bucket


def check_stores(run: Run, *, here: bool = False) -> None:
    """Raises UserError for data that is missing, not complete, or does not fit the run. Folders
    are looked into if those `here` are what the hosts get; else only they know them."""
    from lmwright.data.missing import has_adapter_data
    from lmwright.data.stale import refuse_stale
    from lmwright.program.stores import open_fitting

    if (here or is_bucket(run.data.dir)) and run.data.sources and not has_adapter_data(run):
        refuse_stale(run)
    for field, folder, rows in _folders(run):
        if not here and not is_bucket(folder):
            continue
        try:
            open_fitting(run, folder, seq_len_of(run)).check_batch(rows)
        except UserError as error:
            push = f" (`lmwright data push FOLDER {folder}` copies it there)"
            raise UserError(f"{field}: {error}{push if is_bucket(folder) else ''}") from None
        except Exception as error:  # a client of a bucket that the hosts may read raises any
            print(f"note: {field}: {folder} cannot be read from here: {first_line(error):.200}")


def _folders(run: Run) -> Iterator[tuple[str, str, int]]:
    """Field, folder, and rows of a step that is taken from it."""
    adapters = run.lora.adapters if run.lora is not None else ()
    for number, adapter in enumerate(adapters):
        if adapter.data is not None:
            yield f"lora.adapters.{number}.data", adapter.data, adapter.rows or 1
    if not adapters or any(adapter.data is None for adapter in adapters):
        yield "data.dir", run.data.dir, 1 if adapters else run.train.global_batch_size
