"""Read folders of safetensors files in parts, and write them tensor by tensor.

Input: a folder with `model.safetensors`, or several files and
`model.safetensors.index.json`. Output: views of its tensors, of which only touched
pages are read; or such a folder, written without the model in memory.

A file consists of the length of its header (8 bytes, little-endian), the header (JSON:
name -> dtype, shape, and first and last byte after the header), and the tensors,
row-major and without holes. The `safetensors` package could read these files, but its
writer needs every tensor of a file in memory. So mjax has its own reader and writer.

Source: https://github.com/huggingface/safetensors, README, "Format".
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from mjax import checked_json

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
"""Files of weights that are refused: pickles can run code when loaded, and the others
are of other frameworks."""
_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Location of a tensor."""

    path: Path
    code: str
    """Dtype, as named in the header."""
    shape: tuple[int, ...]
    first_byte: int
    """First byte, counted from the start of the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Described:
    """Header entry of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Files:
    """The tensors of a folder; headers are read and checked at once, data on use."""

    def __init__(
        self, folder: str | os.PathLike[str], one_file: str = ONE_FILE
    ) -> None:
        """Read the headers.

        Args:
          folder: folder with the single file, or with an index of several.
          one_file: name of the single file.

        Raises:
          ValueError: the folder holds no safetensors files.
          RuntimeError: a file is absent, shorter than its header says, or of another
            format.
        """
        self.folder = Path(folder)
        if (self.folder / one_file).exists():
            self._entries = _read_header(self.folder / one_file)
        elif (self.folder / INDEX).exists():
            self._entries = _read_index(self.folder / INDEX)
        else:
            raise ValueError(_without_safetensors(self.folder, one_file))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entries[name].shape

    def view(self, name: str) -> np.ndarray:
        """Return a tensor without reading it: float32, float16 or bfloat16.

        Raises:
          ValueError: the tensor has another dtype.
        """
        entry = self._entries[name]
        if entry.code not in _DTYPES:
            raise ValueError(
                f"{entry.path}: {name} has dtype {entry.code}; supported are "
                f"{', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[entry.code]
        num_bytes = math.prod(entry.shape) * dtype.itemsize
        if not num_bytes:
            return np.empty(entry.shape, dtype)
        # Mapped again each time, so that read pages do not stay in this process'
        # memory.
        part = np.memmap(
            entry.path, np.uint8, "r", offset=entry.first_byte, shape=(num_bytes,)
        )
        return np.asarray(part).view(dtype).reshape(entry.shape)


def _without_safetensors(folder: Path, one_file: str) -> str:
    """Return a message that describes a folder without safetensors, with the remedy."""
    found = sorted(p.name for p in folder.glob("*") if p.suffix in _OTHER_FORMATS)
    if not found:
        return (
            f"{folder} has neither {one_file} nor {INDEX}: the weights are missing; "
            "download them as safetensors"
        )
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{folder} has its weights as {found[0]}{more}, and mjax reads only "
        "safetensors; save them once with transformers: "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        ".save_pretrained(NEW_FOLDER), and copy the files of the tokenizer"
    )


def _read_index(path: Path) -> dict[str, _Entry]:
    """Read the headers of all files in an index; return the entries by tensor name."""
    index = _json(path, path.read_bytes())
    try:
        files = checked_json.check(
            index.get("weight_map"), dict[str, str], "weight_map"
        )
    except ValueError as error:
        raise RuntimeError(f"{path} is damaged: {error}") from error
    if not files:
        raise RuntimeError(f"{path} has no weight_map: it is damaged")
    headers: dict[str, dict[str, _Entry]] = {}
    for file in sorted(set(files.values())):
        if not file or Path(file).name != file:
            raise RuntimeError(f"{path} names {file!r}, which is not a file beside it")
        if not (path.parent / file).exists():
            raise RuntimeError(
                f"{path.parent / file} is missing; {path.name} needs "
                f"{len(set(files.values()))} files. Download it again"
            )
        headers[file] = _read_header(path.parent / file)
    for name, file in files.items():
        if name not in headers[file]:
            raise RuntimeError(
                f"{path} says that {name} is in {file}, which lacks it: one of the two "
                "is damaged or of another model"
            )
    return {name: headers[file][name] for name, file in files.items()}


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read and check the header of one file; return the entries by tensor name."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise RuntimeError(
                    f"{path} is damaged: {size} bytes cannot hold a header of {length}"
                )
            text = file.read(length)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be read: {error.strerror}") from error
    header = _json(path, text)
    header.pop("__metadata__", None)
    entries, spans = {}, []
    for name, described in header.items():
        try:
            entry: _Described = checked_json.check(described, _Described, repr(name))
        except ValueError as error:
            raise RuntimeError(f"{path} is damaged: {error}") from error
        code, shape, (start, stop) = entry.dtype, entry.shape, entry.data_offsets
        wanted = math.prod(shape) * _DTYPES[code].itemsize if code in _DTYPES else None
        bounds_fit = 0 <= start <= stop and all(size >= 0 for size in shape)
        if not bounds_fit or wanted not in (None, stop - start):
            raise RuntimeError(
                f"{path} is damaged: {name} is {code}{list(shape)} in bytes {start} to "
                f"{stop}"
            )
        entries[name] = _Entry(path, code, shape, 8 + length + start)
        spans.append((start, stop))
    spans.sort()
    ends = [0, *(stop for _, stop in spans)]
    if [start for start, _ in spans] != ends[:-1]:
        raise RuntimeError(f"{path} is damaged: its tensors overlap or leave holes")
    if size != 8 + length + ends[-1]:
        raise RuntimeError(
            f"{path} is damaged: it has {size} bytes, its header says "
            f"{8 + length + ends[-1]}. Download it again"
        )
    return entries


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return checked_json.read(text, dict[str, Any])
    except ValueError as error:
        raise RuntimeError(f"{path} is damaged: {error}") from error


@dataclasses.dataclass
class _Place:
    """Destination of a tensor, and how much of it is written."""

    file: BinaryIO
    first_byte: int
    shape: tuple[int, ...]
    missing_bytes: int


class Writer:
    """Writes a folder of safetensors files, with tensors in any order, by rows.

    The headers are written first, from the shapes. Use it as a context manager.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype,
        *,
        file_bytes: int,
    ) -> None:
        """Create the files.

        Args:
          folder: existing folder for the files.
          shapes: shapes of all tensors, in the order of the files.
          dtype: dtype of all tensors: float32, float16 or bfloat16.
          file_bytes: maximum bytes of a file; a larger tensor gets its own file.
        """
        self._code = next(code for code, known in _DTYPES.items() if known == dtype)
        self._dtype = dtype
        self._places: dict[str, _Place] = {}
        self._files: list[BinaryIO] = []
        groups = _grouped(
            {n: math.prod(shape) * dtype.itemsize for n, shape in shapes.items()},
            file_bytes,
        )
        names = [ONE_FILE]
        if len(groups) > 1:
            total = len(groups)
            names = [
                f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)
            ]
            weight_map = {
                name: file
                for file, group in zip(names, groups, strict=True)
                for name in group
            }
            total_size = sum(sum(group.values()) for group in groups)
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for file, group in zip(names, groups, strict=True):
            self._start(folder / file, group, shapes)

    def _start(
        self, path: Path, sizes: dict[str, int], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Write one header and allocate the data."""
        # transformers refuses files without this entry.
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, size in sizes.items():
            header[name] = {
                "dtype": self._code,
                "shape": list(shapes[name]),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # Aligns the data.
        file = path.open("wb")
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + offset)
        for name, size in sizes.items():
            first = start + header[name]["data_offsets"][0]
            self._places[name] = _Place(file, first, tuple(shapes[name]), size)

    def write(
        self, name: str, rows: np.ndarray, first_row: int = 0, first_column: int = 0
    ) -> None:
        """Write rows of a tensor, or columns of a matrix.

        Args:
          name: name of the tensor.
          rows: [rows, ...], any float dtype; it is cast.
          first_row: index of the first row.
          first_column: column of the matrix at which `rows` begin.
        """
        place = self._places[name]
        if rows.ndim == 2 and rows.shape[1] < place.shape[1]:
            for row, values in enumerate(rows, first_row):
                self._write(place, values, row * place.shape[1] + first_column)
            return
        assert rows.shape[1:] == place.shape[1:], (name, rows.shape)
        assert first_row + rows.shape[0] <= place.shape[0], (name, rows.shape)
        self._write(place, rows, first_row * math.prod(place.shape[1:]))

    def _write(self, place: _Place, values: np.ndarray, first: int) -> None:
        """Write consecutive entries of a tensor from index `first` on."""
        data = np.ascontiguousarray(values, self._dtype).reshape(-1).view(np.uint8)
        place.file.seek(place.first_byte + first * self._dtype.itemsize)
        place.file.write(data)
        place.missing_bytes -= data.size

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files; unless an error is raised, check that they are complete."""
        with contextlib.ExitStack() as files:
            for file in self._files:
                files.enter_context(file)
        missing = [name for name, place in self._places.items() if place.missing_bytes]
        assert error or not missing, f"not completely written: {missing}"


def _grouped(sizes: dict[str, int], file_bytes: int) -> list[dict[str, int]]:
    """Divide tensors among files, in order; return the bytes by name for each file."""
    groups: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if groups[-1] and sum(groups[-1].values()) + size > file_bytes:
            groups.append({})
        groups[-1][name] = size
    return groups
