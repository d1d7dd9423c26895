"""The header of a GGUF file."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.errors import UserError, install
from lmwright.storage.mirror import shown

MOST_ENTRIES = 2**23  # of a list in the header; vocabularies have 2**18


class GgufHeader:
    """The header of a GGUF file, checked: metadata, and where each tensor lies.

    Raises UserError for a file that is cut, damaged or one of several parts.
    """

    def __init__(self, path: Path):
        gguf = gguf_package()
        self.path = path
        try:
            reader = _reader(gguf)(path)
            self.meta = {name: field.contents() for name, field in reader.fields.items()}
        except FileNotFoundError:
            raise UserError(f"{shown(path)}: is not there") from None
        except Exception as error:  # the reader trusts the file: it raises whatever comes of it
            raise UserError(
                f"{path}: not a GGUF file, or truncated or damaged "
                f"({str(error) or type(error).__name__}); download it again"
            ) from None
        if reader.endianess.name == "BIG":
            raise UserError(f"{path}: is a big-endian GGUF file; get the little-endian one")
        if int(self.meta.get("split.count") or 0) > 1:
            raise UserError(
                f"{path}: is one of {self.meta['split.count']} parts; merge them with "
                f"llama-gguf-split --merge"
            )
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        size = path.stat().st_size
        for tensor in self.tensors.values():
            if int(tensor.data_offset) + int(tensor.n_bytes) > size:
                raise UserError(f"{path}: ends within {tensor.name}; download it again")


@cache
def _reader(gguf: Any) -> type:
    """GGUFReader, three times as fast on long vocabularies. It never reads past the end of the
    file: the package would go on reading nothing for as long as a damaged count says."""

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._array

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._array = mapped.view(np.ndarray)  # slices of a memmap are slow to make

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **by: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self._array):
                raise ValueError(f"entry at byte {offset} goes beyond its end")
            return super()._get(offset, dtype, count, *order, **by)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                entries = int(self._get(orig_offs + 4, np.uint64)[0])
                if entries > MOST_ENTRIES:
                    raise ValueError(f"array at byte {orig_offs} of {entries:,} entries")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader


def gguf_package() -> Any:
    """The gguf module. Raises UserError, naming the extra, where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"GGUF files need the gguf package; {install('gguf')}") from None
    return gguf


def write_tensor(writer: Any, tensor: np.ndarray) -> None:
    """Writes the next tensor of a GGUF file. Raises OSError where a full disk does not take it."""
    writer.write_tensor_data(tensor.view(_Written))


class _Written(np.ndarray):
    def tofile(self, file: Any) -> None:  # numpy's says nothing of the end of what a disk lacks
        file.write(np.ascontiguousarray(self).view(np.ndarray).reshape(-1).view(np.uint8).data)
