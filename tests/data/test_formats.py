"""Formats of records: JSON arrays, CSV, nested fields, chats in parquet."""

import gzip
import io
import json
import pathlib

import pyarrow
import pyarrow.parquet
import pytest

from mjax.data import compressed, formats
from mjax.data.corpora import documents, find_sources
from mjax.data.formats import read_records

RECORDS = [{"text": f'line {i}, "é"\n' * (i % 5 + 1), "n": i} for i in range(40)]


def texts(path: pathlib.Path, field: str = "text", start: int = 0) -> dict[str, str]:
    found = documents(find_sources((str(path),)), field, start=(0, start))
    return {document.name: "".join(map(str, document.pieces)) for document in found}


def as_csv(delimiter: str = ",") -> bytes:
    cells = [["n", "text"], *([str(r["n"]), r["text"]] for r in RECORDS)]
    quoted = [['"' + cell.replace('"', '""') + '"' for cell in row] for row in cells]
    lines = "\r\n".join(delimiter.join(row) for row in quoted)
    return b"\xef\xbb\xbf" + lines.encode()  # as spreadsheets write it


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", as_csv()),
        ("a.tsv", as_csv("\t")),
        ("a.csv.gz", gzip.compress(as_csv())),
    ],
)
def test_each_row_of_csv_is_a_document(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    found = texts(path)
    assert [*found] == [f"{name}:{i}" for i in range(1, 41)]
    assert [*found.values()] == [record["text"] for record in RECORDS]
    assert [*texts(path, start=39)] == [f"{name}:39", f"{name}:40"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n", r"a\.csv has no column 'text', only \['a', 'b'\]; set --data"),
        (b"text,text\n1,2\n", r"has several columns 'text'"),
        (b"text,b\n1,2\n1,2,3\n", r"a\.csv:2 has 3 cells, but its header names 2 col"),
        (b'text\n"a"b\n', r"a\.csv:1 is not CSV \(.*\); put quotes around"),
        (b'text\na\n"open\n', r"a\.csv:2 is not CSV"),
        (b"text\n\xff\n", r"a\.csv:1 is not UTF-8"),
        (b'text\n"' + b"xxxxxxx\n" * 9 + b'"', r"a\.csv:1 is not CSV \(field larger"),
        (b"text\n" + b"x" * 99 + b"\n", r"a\.csv:2 has over 50 bytes"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 50)
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts(tmp_path / "a.csv")


def read_json(path: pathlib.Path, content: bytes) -> list[tuple[int, dict]]:
    path.write_bytes(content)
    return [*read_records(path, "json", 1, compressed.ignore)]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_json_holds_the_records_of_jsonl(
    tmp_path, monkeypatch, size, indent
):
    monkeypatch.setattr(formats, "PIECE_CHARS", size)
    path, wanted = tmp_path / "a.json", [*enumerate(RECORDS, start=1)]
    array = json.dumps(RECORDS, indent=indent, ensure_ascii=False)
    assert read_json(path, f"\n {array}\n".encode()) == wanted
    lines = "\n".join(map(json.dumps, RECORDS)).encode()
    assert read_json(path, lines) == wanted
    assert read_json(path, b" [ ] ") == []
    assert read_json(path, b"") == []


def test_an_array_is_read_one_record_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_CHARS", 100)
    path, counts = tmp_path / "a.json", []
    path.write_bytes(json.dumps(RECORDS * 200).encode())
    found = read_records(path, "json", 1, counts.append)
    next(found)
    buffers = compressed._BUFFER_BYTES + io.DEFAULT_BUFFER_SIZE
    assert sum(counts) <= buffers < path.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"b": ', r"a\.json:2 is cut off, is not JSON"),
        (b'[{"a": 1}', r"a\.json:2 is cut off"),
        (b'[{"a": 1}, 2]', r"a\.json:2 holds a int, not an object"),
        (b'[{"a": 1} {"b": 1}]', r"a\.json:2 is not JSON \(a comma before it is mis"),
        (b'[{"a": 1},]', r"a\.json:2 is cut off, is not JSON"),
        (b'[{"a": 1}] []', r"has text after its array; give one"),
        (b'[{"a": "\xff"}]', r"a\.json:1 is not UTF-8"),
        (b'{\n  "a": 1\n}', r"a\.json:1 is not JSON"),
        (b'[{"a": "' + b"x" * 99, r"a\.json:1 is cut off, .* over 50 characters"),
    ],
)
def test_json_that_is_cut_or_no_array_of_objects_is_refused(
    tmp_path, monkeypatch, content, message
):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 50)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "a.json", content)


def test_a_field_of_an_object_is_named_with_a_dot(tmp_path):
    records = [{"meta": {"id": i, "body": f"text {i}"}, "x": 1} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        found = texts(tmp_path / name, "meta.body")
        assert [*found.values()] == ["text 0", "text 1", "text 2"]
        with pytest.raises(ValueError, match=r"has no field 'meta.text', only \['meta"):
            texts(tmp_path / name, "meta.text")
    (tmp_path / "b.jsonl").write_text('{"meta.body": "a name with a dot"}')
    assert [*texts(tmp_path / "b.jsonl", "meta.body").values()] == ["a name with a dot"]


def test_reading_parquet_reports_its_bytes_a_few_rows_at_a_time(tmp_path):
    path, reads = tmp_path / "a.parquet", []
    table = pyarrow.table({"text": [f"text {i}" for i in range(200)]})
    pyarrow.parquet.write_table(table, path)
    for _ in formats.read_texts(path, "parquet", "text", 0, reads.append):
        pass
    assert len(reads) == 4  # 64 rows each
    assert sum(reads) == path.stat().st_size
