import gzip
import json
import pathlib

import pyarrow
import pytest

from mjax.data.compressed import opened
from mjax.data.corpora import documents, find_sources

LINES = [json.dumps({"text": f"document {i} é " * 40}) for i in range(300)]
CONTENT = "\n".join(LINES).encode()


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def read(path: pathlib.Path) -> dict[str, str]:
    sources = find_sources((str(path),))
    return {d.name: "".join(map(str, d.pieces)) for d in documents(sources, "text")}


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_hold_the_documents_of_the_plain_ones(tmp_path, suffix):
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    for name, content in {"a.jsonl": CONTENT, "b.txt": "é text\n".encode() * 9}.items():
        (tmp_path / "plain" / name).write_bytes(content)
        # Two members, one after the other, are one content.
        packed = compress(content[:100], suffix) + compress(content[100:], suffix)
        (tmp_path / "packed" / (name + suffix)).write_bytes(packed)
    plain, packed = read(tmp_path / "plain"), read(tmp_path / "packed")
    assert list(packed.values()) == list(plain.values())
    names = [name.replace(suffix, "") for name in packed]
    assert names == list(plain)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_half_a_file_is_refused_with_its_name_and_the_byte(tmp_path, suffix, kept):
    packed = compress(CONTENT, suffix)
    path = tmp_path / f"a.jsonl{suffix}"
    size = int(len(packed) * kept)
    path.write_bytes(packed[:size])
    with pytest.raises(
        ValueError,
        match=rf"a\.jsonl\{suffix} is cut off: .* by byte {size} .*; copy or download",
    ):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_cut_between_two_streams_is_a_shorter_file(tmp_path, suffix):
    """Neither format says how many streams follow: docs/data.md tells."""
    middle = CONTENT.index(b"\n") + 1
    first = compress(CONTENT[:middle], suffix)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(first)
    assert [*read(path)] == [f"{path.name}:1"]
    path.write_bytes(first + compress(CONTENT[middle:], suffix)[:-1])
    with pytest.raises(ValueError, match="is cut off"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_and_misnamed_files_are_refused(tmp_path, suffix):
    packed = bytearray(compress(CONTENT, suffix))
    packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / f"a.jsonl{suffix}"
    for content in (bytes(packed), b"plain text\n" * 9):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"is not intact \{suffix}: .* byte \d+"):
            read(path)


def test_compressed_parquet_is_refused_when_it_is_found(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(ValueError, match=r"a\.parquet\.gz.*; decompress the file"):
        find_sources((str(tmp_path),))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_the_bytes_that_were_read_are_counted_on_the_disk(tmp_path, name):
    path = tmp_path / name
    suffix = path.suffix
    path.write_bytes(CONTENT if suffix == ".txt" else compress(CONTENT, suffix))
    counts: list[int] = []
    with opened(path, counts.append) as file:
        assert file.read() == CONTENT
    assert sum(counts) == path.stat().st_size


def test_reading_starts_at_a_line_without_looking_at_those_before(tmp_path):
    (tmp_path / "a.jsonl").write_text("not JSON\n" + "\n".join(LINES[:3]))
    (tmp_path / "b.jsonl").write_text(LINES[5])
    sources = find_sources((str(tmp_path),))
    found = [d.name for d in documents(sources, "text", start=(0, 3))]
    assert found == ["a.jsonl:3", "a.jsonl:4", "b.jsonl:1"]
    assert [d.name for d in documents(sources, "text", start=(1, 0))] == ["b.jsonl:1"]
