import errno
import io
import json
import os
import pathlib
import sys

import pyarrow
import pyarrow.parquet
import pytest

from mjax.data import formats
from mjax.data.corpora import documents, find_sources
from mjax.data.formats import split_text


def read(*paths: pathlib.Path | str, text_field: str = "text") -> dict[str, str]:
    sources = find_sources(tuple(str(path) for path in paths))
    return {d.name: "".join(map(str, d.pieces)) for d in documents(sources, text_field)}


def test_the_standard_library_is_found_without_tests_and_generated_documentation():
    names = [source.name for source in find_sources(("stdlib",))]
    assert {"ast.py", "json/decoder.py", "unittest/case.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "pydoc_data"}
    assert names == sorted(names)


def test_a_folder_is_read_in_the_order_of_relative_paths_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "b" / "x.md").write_text("bx")
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_bytes(b"\0")
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"\0")
    assert list(read(tmp_path).items()) == [
        ("a.py", "a"),
        ("b/x.md", "bx"),
        ("c.txt", "c"),
    ]


def test_lines_of_jsonl_and_rows_of_parquet_are_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "é1"}\n\n{"body": "2", "text": 5}\n')
    table = pyarrow.table({"body": ["p1", "p2"], "other": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert read(tmp_path, text_field="body") == {
        "a.jsonl:1": "é1",
        "a.jsonl:3": "2",
        "b.parquet:0": "p1",
        "b.parquet:1": "p2",
    }


@pytest.mark.parametrize("text", ["é" * 50, "ab\n" * 30, "\n" + "x" * 99, "", "a\r\nb"])
def test_a_long_document_comes_in_pieces_that_join_to_the_text(
    tmp_path, monkeypatch, text
):
    # 7 is odd: blocks of the file end inside a two-byte character.
    monkeypatch.setattr(formats, "PIECE_CHARS", 7)
    assert all(0 < len(piece) <= 7 for piece in split_text(text))
    assert "".join(split_text(text)) == text
    (tmp_path / "long.txt").write_bytes(text.encode() or b"-")
    assert read(tmp_path / "long.txt") == {"long.txt": text or "-"}


def test_a_missing_path_names_the_nearest_one(tmp_path):
    (tmp_path / "corpus").mkdir()
    with pytest.raises(ValueError, match=r"corpsu' does not exist; did you.*corpus'\?"):
        read(tmp_path / "corpsu")
    with pytest.raises(
        ValueError, match="'stdlb' does not exist; did you mean 'stdlib'"
    ):
        read("stdlb")
    with pytest.raises(ValueError, match="does not exist; give stdlib, synthetic, or"):
        read(tmp_path / "zzz")


def test_the_name_of_a_data_set_of_a_hub_is_told_its_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="does not exist; give") as found:
        read("roneneldan/TinyStories")
    assert str(found.value).endswith(
        "; for the data set of a hub, give hf://datasets/roneneldan/TinyStories@main"
    )
    (tmp_path / "corpus").mkdir()
    for name in ("corpus/TinyStories", "texts/a.txt", "a/b/c", "/org/name", "../name"):
        with pytest.raises(ValueError, match="does not exist; give") as found:
            read(name)
        assert "hf://" not in str(found.value), name


def test_empty_files_and_folders_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt' is empty"):
        read(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="holds no file with text"):
        read(tmp_path)


def test_a_folder_that_cannot_be_listed_is_refused_not_skipped(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scandir = os.scandir

    def scan(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(ValueError, match="locked cannot be read: Permission denied"):
        read(tmp_path)


def test_files_that_are_not_text_are_refused_with_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_CHARS", 4)
    (tmp_path / "nul.txt").write_bytes(b"text\0more")
    with pytest.raises(
        ValueError, match=r"nul\.txt is not UTF-8 text \(NUL at byte 4\)"
    ):
        read(tmp_path / "nul.txt")
    (tmp_path / "latin.txt").write_bytes("grüne Wiese".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text .*at byte 2\)"):
        read(tmp_path / "latin.txt")
    (tmp_path / "cut.txt").write_bytes("abcdefé".encode()[:-1])
    with pytest.raises(ValueError, match=r"unexpected end of data at byte 6"):
        read(tmp_path / "cut.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"d\.jsonl:2 is not JSON \(Expecting"),
        (
            '{"body": "a"}',
            r"d\.jsonl:2 has no field 'text', only \['body'\]; set --data",
        ),
        ('{"text": null}', r"d\.jsonl:2: field 'text' is null; remove the record, or"),
        ('["text"]', r"d\.jsonl:2 holds a list, not an object"),
        (
            '{"text": "a", "n": ' + "[" * 100_000 + "]" * 100_000 + "}",
            r"d\.jsonl:2 cannot be read as JSON \(maximum recursion depth exceeded",
        ),
        (
            '{"text": "a", "n": ' + "9" * 6000 + "}",
            r"d\.jsonl:2 cannot be read as JSON \(Exceeds the limit \(4300 digits\)",
        ),
        (
            r'{"text": "an \ud800"}',
            r"d\.jsonl:2: the text has half a surrogate pair, \\ud800, after 'an ', .*"
            "write the whole pair",
        ),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, message):
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "fine"}) + f"\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "d.jsonl")
    (tmp_path / "e.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(ValueError, match=r"e\.jsonl:1 is not UTF-8 text"):
        read(tmp_path / "e.jsonl")


def test_bad_parquet_is_named(tmp_path):
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(
        ValueError, match=r"bad\.parquet is not a readable parquet file"
    ):
        read(tmp_path / "bad.parquet")
    columns = {"text": ["a", None], "raw": [b"a", b"b"], "meta": [{"text": "a"}, None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "null.parquet")
    for field, message in (
        ("text", r"null\.parquet:1: field 'text' is null; remove the record, or write"),
        ("meta.text", r"null\.parquet:1: field 'meta\.text' is null; remove the"),
        ("raw", r"null\.parquet:0: field 'raw' is binary, .*; cast the column to st"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "null.parquet", text_field=field)
    with pytest.raises(ValueError, match=r"has no column 'body', only \['meta'"):
        read(tmp_path / "null.parquet", text_field="body")


def test_damaged_pages_of_parquet_are_named(tmp_path):
    path = tmp_path / "pages.parquet"
    table = pyarrow.table({"text": [f"text of row {i} " * 20 for i in range(500)]})
    pyarrow.parquet.write_table(table, path, compression="snappy")
    content = bytearray(path.read_bytes())
    for offset in range(100, 900):
        content[offset] ^= 0x5A
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"pages\.parquet is not a readable parquet"):
        read(path)


def test_a_page_with_a_flipped_bit_is_noticed_where_pages_have_checksums(tmp_path):
    path = tmp_path / "page.parquet"
    table = pyarrow.table({"text": ["text " * 400]})
    pyarrow.parquet.write_table(
        table,
        path,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"page\.parquet is not .*CRC checksum"):
        read(path)


def test_a_column_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "bytes.parquet"
    binary = pyarrow.array([b"fine", b"\xff"], pyarrow.binary())
    pyarrow.parquet.write_table(
        pyarrow.table({"text": binary.view(pyarrow.string())}), path
    )
    message = r"bytes\.parquet is not .*\(rows before 1 were read\): 'utf-8' codec"
    with pytest.raises(ValueError, match=message):
        read(path)


def test_links_to_folders_and_broken_links_are_left_out_by_name(tmp_path, caplog):
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "b.txt").write_text("b")
    (folder / "a.txt").write_text("a")
    (folder / "linked.txt").symlink_to(other / "b.txt")
    (folder / "linked").symlink_to(other)
    (folder / "broken.txt").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (folder / ".hidden").symlink_to("nowhere")
    assert read(folder) == {"a.txt": "a", "linked.txt": "b"}
    said = [record.getMessage() for record in caplog.records]
    assert [message.replace(f"{folder}", "D") for message in said] == [
        "--data.path: left out of D: D/broken.txt (broken link to nowhere)",
        "--data.path: left out of D: D/linked (link to a folder; give it as a path of "
        "its own)",
        "--data.path: left out of D: D/pipe (neither a file nor a folder)",
    ]


def test_of_many_broken_links_ten_are_named(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a")
    for index in range(25):
        (tmp_path / f"broken{index}").symlink_to("nowhere")
    read(tmp_path)
    assert len(caplog.records) == 11
    assert caplog.records[-1].getMessage().endswith(": 15 more of these")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 300, "x' cannot be read: File name too long"),
        ("~nobody-of-this-name/a", "name/a' cannot be read: Could not determine"),
        (f"{__file__}/a", r"py/a' does not exist; give"),
        ("loop", r"loop' cannot be read: Too many levels of symbolic links"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path, path, message):
    (tmp_path / "loop").symlink_to("loop")
    is_plain = path.startswith(("~", "/"))
    with pytest.raises(ValueError, match=message):
        read(path if is_plain else tmp_path / path)


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("a")
    with pytest.raises(ValueError, match="is not UTF-8; rename"):
        read(tmp_path)


def test_an_error_of_the_disk_while_a_file_is_read_is_named(tmp_path, monkeypatch):
    class Failing(io.RawIOBase):
        def readinto(self, *_):
            raise OSError(errno.EIO, "Input/output error")

    def read_to_the_end(source):
        for document in documents([source], "text"):
            list(document.pieces)

    for name in ("a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst"):
        (tmp_path / name).write_text("a")
        [bad] = find_sources((str(tmp_path / name),))
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "open", lambda *_, **__: Failing())
            with pytest.raises(
                ValueError, match=f"{name} cannot be read: Input/output"
            ):
                read_to_the_end(bad)


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_text("-")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'mjax\[data\]'"):
        read(tmp_path / "a.parquet")


def test_synthetic_does_not_mix_with_files():
    with pytest.raises(ValueError, match="give it alone"):
        read("synthetic", "stdlib")


def test_a_line_too_long_for_the_memory_is_refused_before_it_is_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 30)
    file = tmp_path / "a.jsonl"
    longest = '{"text": "' + "x" * 18 + '"}'
    file.write_text(f"{longest}\n")  # 30 bytes and the end of the line
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1 has over 30 bytes; give a document"
    ):
        read(file)
    file.write_text('{"text": "short"}\n' + longest)
    assert read(file) == {"a.jsonl:1": "short", "a.jsonl:2": "x" * 18}
    file.write_text('{"text": "short"}\n' + "x" * 10_000_000)
    with pytest.raises(ValueError, match=r"a\.jsonl:2 has over 30 bytes"):
        read(file)
