"""Files of the format: written, read and refused."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.hugging_face.safetensors import INDEX, ONE_FILE, Files, Writer

F32 = np.dtype(np.float32)
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2, 2)}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=s).astype(F32) for name, s in SHAPES.items()}


def write_all(folder: Path, dtype: np.dtype = F32, file_bytes: int = 10**9) -> None:
    with Writer(folder, SHAPES, dtype, file_bytes=file_bytes) as writer:
        for name, array in reversed(arrays().items()):
            writer.write(name, array)


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


def entry(dtype: Any, shape: Any, start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_a_file_is_a_length_a_json_header_and_the_bytes_in_order(tmp_path: Path):
    write_all(tmp_path)
    content = (tmp_path / ONE_FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [3, 4], 0, 48),
        "b": entry("F32", [5], 48, 68),
        "c": entry("F32", [2, 2, 2], 68, 100),
    }
    assert content[8 + length :] == b"".join(a.tobytes() for a in arrays().values())


@pytest.mark.parametrize("file_bytes", [10**9, 70, 1])
def test_what_is_written_is_read_from_one_file_or_many(tmp_path: Path, file_bytes: int):
    write_all(tmp_path, file_bytes=file_bytes)
    num_files = {10**9: 1, 70: 2, 1: 3}[file_bytes]
    assert len(list(tmp_path.glob("*.safetensors"))) == num_files
    files = Files(tmp_path)
    assert files.names() == list(SHAPES)
    for name, array in arrays().items():
        assert files.shape(name) == array.shape
        np.testing.assert_array_equal(files.view(name), array, strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_are_rounded_when_written_and_read_as_they_are(
    tmp_path: Path, dtype: str
):
    narrow = np.dtype(jnp.dtype(dtype))
    write_all(tmp_path, narrow)
    for name, array in arrays().items():
        got = Files(tmp_path).view(name)
        np.testing.assert_array_equal(got, array.astype(narrow), strict=True)


def test_rows_come_in_any_order(tmp_path: Path):
    table = np.arange(12, dtype=F32).reshape(6, 2)
    with Writer(tmp_path, {"t": (6, 2)}, F32, file_bytes=10**9) as writer:
        writer.write("t", table[4:], 4)
        writer.write("t", table[:4], 0)
    np.testing.assert_array_equal(Files(tmp_path).view("t"), table)


def test_a_tensor_that_is_not_written_as_a_whole_is_an_error(tmp_path: Path):
    with (
        pytest.raises(AssertionError, match=r"not completely written: \['t'\]"),
        Writer(tmp_path, {"t": (6, 2)}, F32, file_bytes=10**9) as writer,
    ):
        writer.write("t", np.zeros((4, 2), F32))


def test_a_part_of_a_file_larger_than_memory_is_read_without_the_rest(tmp_path: Path):
    """1 TiB, almost all of it a hole without disk space."""
    rows, width = 2**28, 1024
    size = rows * width * 4
    text = json.dumps({"big": entry("F32", [rows, width], 0, size)}).encode()
    path = tmp_path / ONE_FILE
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(8 + len(text) + (rows - 2) * width * 4)
        file.write(np.arange(2 * width, dtype=F32).tobytes())
    files = Files(tmp_path)
    tracemalloc.start()
    part = np.array(files.view("big")[rows - 2 :, 10:12])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(part, [[10, 11], [width + 10, width + 11]])
    assert peak_bytes < 100_000


WHOLE = {"a": entry("F32", [2], 0, 8)}
DAMAGED = {
    "empty": (b"", "cannot hold a header"),
    "truncated length": (b"\1\0\0", "3 bytes cannot hold a header of 1"),
    "truncated header": (raw(WHOLE)[:-4], "cannot hold a header"),
    "header of nonsense": (raw(b"\xff\xfe{}"), "not JSON"),
    "header is a list": (raw([1]), r"must be an object, got \[1\]"),
    "huge header": (raw({}, length=2**63), "cannot hold a header"),
    "truncated data": (raw(WHOLE, b"\0" * 7), "its header says"),
    "more data": (raw(WHOLE, b"\0" * 9), "its header says"),
    "no offsets": (
        raw({"a": {"dtype": "F32", "shape": [2]}}),
        "'a' must be an object with data",
    ),
    "dtype is a list": (
        raw({"a": entry(["F32"], [2], 0, 8)}),
        r"'a'\.dtype must be text",
    ),
    "shape is a text": (
        raw({"a": entry("F32", "2", 0, 8)}),
        r"'a'\.shape must be a list",
    ),
    "size is a text": (raw({"a": entry("F32", ["2"], 0, 8)}), "must be a whole number"),
    "one offset": (
        raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}),
        "must be a list of 2",
    ),
    "nested": (raw(b"[" * 100_000), "nested too deeply"),
    "size": (raw({"a": entry("F32", [3], 0, 8)}, b"\0" * 8), r"F32\[3\] in bytes 0"),
    "negative": (raw({"a": entry("F32", [-1, -2], 0, 8)}, b"\0" * 8), r"F32\[-1, -2\]"),
    "backwards": (raw({"a": entry("I8", [3], 8, 0)}, b"\0" * 8), "in bytes 8 to 0"),
    "overlap": (
        raw(WHOLE | {"b": entry("F32", [2], 4, 12)}, b"\0" * 12),
        "overlap or leave holes",
    ),
    "hole": (
        raw(WHOLE | {"b": entry("F32", [1], 12, 16)}, b"\0" * 16),
        "overlap or leave holes",
    ),
}


@pytest.mark.parametrize(("content", "says"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_when_opened(tmp_path: Path, content, says):
    (tmp_path / ONE_FILE).write_bytes(content)
    with pytest.raises(RuntimeError, match=says) as refused:
        Files(tmp_path)
    assert str(tmp_path / ONE_FILE) in str(refused.value)


def test_a_missing_file_of_several_is_named(tmp_path: Path):
    write_all(tmp_path, file_bytes=1)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"model-00002-of-00003\S+ is missing"):
        Files(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": "model-00002-of-00003.safetensors"}, "says that a is in"),
        ({"a": "../elsewhere.safetensors"}, "not a file beside it"),
        ({}, "no weight_map"),
        (None, "weight_map must be an object, got None"),
        ({"a": ["x"]}, r"weight_map\.a must be text, got"),
        ({"a": ""}, "not a file beside it"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, weight_map, says):
    write_all(tmp_path, file_bytes=1)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(RuntimeError, match=says):
        Files(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has neither .*: the weights are missing"):
        Files(tmp_path)


def test_weights_in_another_format_are_refused_with_the_way_to_save_them(
    tmp_path: Path,
):
    for name in (
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ):
        (tmp_path / name).write_bytes(b"no pickle is opened")
    with pytest.raises(ValueError, match=r"pytorch_model-00001-of-0.* and 1 more") as e:
        Files(tmp_path)
    assert f"from_pretrained({str(tmp_path)!r}).save_pretrained(NEW" in str(e.value)


def test_a_tensor_of_whole_numbers_may_lie_there_but_is_not_read(tmp_path: Path):
    (tmp_path / ONE_FILE).write_bytes(raw({"i": entry("I64", [1], 0, 8)}, b"\0" * 8))
    files = Files(tmp_path)
    with pytest.raises(ValueError, match=r"i has dtype I64; .* F32, F16, BF16"):
        files.view("i")
