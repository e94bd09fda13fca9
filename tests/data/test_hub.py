"""Data sets of a hub, read from a small one on this machine."""

import concurrent.futures
import gzip
import json
import pathlib

import pytest

from mjax.data import cache_files, corpora, file_hashes, hub_library
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.hub_datasets import fetch
from tests.data.hub_server import COMMIT, NEXT

PATH = "hf://datasets/org/texts@main"


def config(tmp_path: pathlib.Path, path: str = PATH) -> DataConfig:
    return DataConfig(path=(path,), cache_dir=str(tmp_path / "cache"), seq_len=8)


def test_a_data_set_is_read_as_its_files_are_and_the_commit_is_recorded(hub, tmp_path):
    for name in ("a.jsonl", "sub/b.txt"):
        file = tmp_path / "plain" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(hub.files[name])
    dataset = open_dataset(config(tmp_path), seed=0)
    plain = open_dataset(config(tmp_path, str(tmp_path / "plain")), seed=0)
    assert dataset.fingerprint == plain.fingerprint
    assert dataset.origins == (f"hf://datasets/org/texts@{COMMIT}:default:train",)
    assert plain.origins == ()
    [manifest] = (tmp_path / "cache").glob("*/manifest.json")
    assert f"hf://datasets/org/texts@{COMMIT}" in manifest.read_text()
    assert not any("hidden" in asked for asked in hub.asked)


def test_other_files_in_the_cache_of_the_library_are_not_read(hub, tmp_path):
    fetched = fetch(PATH)
    (fetched.folder / "c.txt").write_text("from another program")
    assert [s.name for s in corpora.find_sources((PATH,))] == ["a.jsonl", "sub/b.txt"]


def test_without_the_hub_a_whole_copy_is_read_and_a_part_is_refused(
    hub, tmp_path, caplog
):
    hub.cut.add("sub/b.txt")
    with pytest.raises(
        ValueError, match=r"sub/b\.txt stopped \(.*\); start again; the downloaded part"
    ):
        fetch(PATH)
    hub.status = 503
    with pytest.raises(ValueError, match="this machine has no complete copy"):
        fetch(PATH)
    hub.status = 200
    hub.cut.clear()
    hub.asked.clear()
    whole = fetch(PATH)
    assert not any("GET" in asked and "a.jsonl" in asked for asked in hub.asked)
    hub.status = 503
    assert fetch(PATH) == whole
    assert f"reading the copy of commit {COMMIT}" in caplog.text


def test_a_file_that_was_edited_in_the_cache_is_refused_until_it_is_deleted(hub):
    path = fetch(PATH).folder / "sub" / "b.txt"
    path.write_bytes(b"text of B\n" * 9)
    for status in (200, 503):
        hub.status = status
        with pytest.raises(
            ValueError,
            match=r"b\.txt is not what was downloaded \(its SHA-256 is .*del",
        ):
            fetch(PATH)
    hub.status = 200
    path.resolve().unlink()
    assert (fetch(PATH).folder / "sub" / "b.txt").read_bytes() == hub.files["sub/b.txt"]


def test_a_file_that_arrives_damaged_is_removed_and_refused(hub):
    for name in ("a.jsonl", "sub/b.txt"):
        content = bytearray(hub.files[name])
        content[20] ^= 1
        hub.damage = {name: bytes(content)}
        with pytest.raises(
            ValueError, match=r"arrived damaged .* instead of .*was remov"
        ):
            fetch(PATH)
    hub.damage = {}
    assert (fetch(PATH).folder / "a.jsonl").read_bytes() == hub.files["a.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://datasets/org/texts", r"must be hf://datasets/NAME@REVISION .*@main"),
        ("hf://org/texts@main", r"must be hf://datasets/NAME@REVISION"),
        ("hf://datasets/org/texts@nope", r"no revision 'nope'; give a branch"),
        ("hf://datasets/org/none@main", r"has no data set org/none, or it is private"),
    ],
)
def test_names_that_do_not_exist_are_refused(hub, path, message):
    with pytest.raises(ValueError, match=message):
        fetch(path)


def test_a_data_set_without_text_is_refused(hub):
    hub.files = {"a.bin": b"x"}
    with pytest.raises(ValueError, match="holds no file of text; files that are read"):
        fetch(PATH)


@pytest.mark.parametrize("answer", [b"<html>log in</html>", b"{}", b"[]", b"null"])
def test_an_answer_that_is_no_data_set_is_refused_or_the_copy_is_read(hub, answer):
    hub.odd_answer = answer
    with pytest.raises(ValueError, match="does not answer as it should"):
        fetch(PATH)
    hub.odd_answer = None
    whole = fetch(PATH)
    hub.odd_answer = answer
    assert fetch(PATH) == whole


def test_names_of_a_hub_never_lead_out_of_its_cache(hub, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("not of the hub")
    hub.files |= {str(own): b"other", "../../../../own.txt": b"other"}
    assert fetch(PATH).files == ["a.jsonl", "sub/b.txt"]
    hub.commit = "../../../.."
    hub.files = {"own.txt": b"other"}
    fetch(PATH)  # the copy
    assert own.read_text() == "not of the hub"


def test_passwords_and_signatures_of_addresses_are_not_told(hub, monkeypatch):
    host = f"127.0.0.1:{hub.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:secret@{host}")
    hub.status = 503
    with pytest.raises(ValueError, match=f"the hub http://{host} does not") as caught:
        fetch(PATH)
    assert "secret" not in str(caught.value)
    error = OSError("403 for url: https://cdn.io/a?X-Amz-Signature=abc (Forbidden)")
    assert hub_library.first_line(error) == "403 for url: https://cdn.io/a (Forbidden)"


def test_processes_that_start_together_and_a_cache_without_room(hub, monkeypatch):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(set(map(str, pool.map(fetch, [PATH] * 8)))) == 1

    def full(path):
        raise cache_files.unwritable(path.parent, OSError(28, "No space left"))

    monkeypatch.setattr(file_hashes, "_SETTLED_NS", -(10**15))
    fetch(PATH)  # the files are hashed
    monkeypatch.setattr(cache_files, "locked", full)
    fetch(PATH)  # nothing is written where everything is there
    hub.commit = NEXT
    with pytest.raises(ValueError, match=r"No space left\); set HF_HUB_CACHE"):
        fetch(PATH)


CARD = """---
license: mit
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: ["en/*.csv.gz", "LICENSE.txt"]
  - split: dev
    path: en/deep/**/d.json
- config_name: raw
  data_files: raw/x.zip
---
# A data set
"""


def of_configs(hub) -> None:
    array = json.dumps([{"text": f"object {i}"} for i in range(40)])
    rows = "text\n" + "".join(f"row {i} of a\n" for i in range(40))
    hub.files = {
        "README.md": CARD.encode(),
        "LICENSE.txt": b"Do what you want.",
        "en/a.csv.gz": gzip.compress(rows.encode()),
        "en/deep/er/d.json": array.encode(),
        "raw/x.zip": b"PK",
        "raw/y.parquet.gz": b"x",
    }


def test_a_card_decides_what_a_configuration_and_a_split_hold(hub, tmp_path, caplog):
    of_configs(hub)
    assert fetch(PATH).files == ["LICENSE.txt", "en/a.csv.gz"]
    assert fetch(PATH).origin == f"hf://datasets/org/texts@{COMMIT}:en:train"
    assert fetch(f"{PATH}:en:dev").files == ["en/deep/er/d.json"]
    assert fetch(f"{PATH}::dev").origin.endswith(f"@{COMMIT}:en:dev")
    assert not any("raw" in asked for asked in hub.asked)
    assert caplog.messages[0] == (
        f"--data.path: left out of {PATH}: en/deep/er/d.json, raw/x.zip, "
        "raw/y.parquet.gz"
    )
    dataset = open_dataset(config(tmp_path, f"{PATH}:en:dev"), seed=0)
    assert dataset.num_documents == 40
    hub.status = 503
    assert fetch(f"{PATH}:en:dev").files == ["en/deep/er/d.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":fr", "has no configuration 'fr', but en, raw"),
        (":en:test", "has no split 'test', but train, dev"),
        (
            ":raw",
            r"split 'train' of configuration 'raw' has no file that is read, only ",
        ),
    ],
)
def test_a_configuration_or_split_that_is_not_there_is_refused(hub, name, message):
    of_configs(hub)
    with pytest.raises(ValueError, match=f"--data.path {PATH}{name} {message}"):
        fetch(PATH + name)
