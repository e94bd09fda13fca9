"""Data sets of a hub, read through blocks that the hosts of a run share."""

import collections
import dataclasses
import json
import logging
import pathlib
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from mjax.data import __main__ as command
from mjax.data import remote, remote_hosts
from mjax.data.config import CacheConfig, DataConfig
from mjax.data.dataset import Dataset, open_dataset, prepare_files
from mjax.processes import hosts
from tests.data.hub_server import COMMIT
from tests.processes.test_agreement import members
from tests.processes.test_distributed import clean_environment, free_port

PATH = "hf://datasets/org/texts@main"


pytestmark = pytest.mark.usefixtures("small_blocks")


def config(folder: pathlib.Path, **cache) -> DataConfig:
    return DataConfig(
        path=(PATH,),
        seq_len=8,
        cache_dir=str(folder / "tokens"),
        cache=CacheConfig(mirror_dir=str(folder / "blocks"), **cache),
    )


def without_mirror(folder: pathlib.Path) -> DataConfig:
    return dataclasses.replace(config(folder), cache=CacheConfig())


def token_files(folder: pathlib.Path) -> dict[str, bytes]:
    root = folder / "tokens"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.glob("*/*")
        if path.parent.name != "blocks"
    }


def bytes_of(hub) -> int:
    return sum(len(hub.files[name]) for name in ("a.jsonl", "sub/b.txt"))


def test_the_token_files_are_those_of_a_download(hub, tmp_path):
    mirrored, plain = tmp_path / "mirrored", tmp_path / "plain"
    del hub.files["README.md"]  # nothing of the data set is downloaded
    prepare_files(config(mirrored))
    cached = {path.name for path in (tmp_path / "hub").rglob("*") if path.is_file()}
    assert not cached & {"a.jsonl", "b.txt"}  # no whole copy is kept
    prepare_files(without_mirror(plain))
    assert token_files(mirrored) == token_files(plain)
    assert f"hf://datasets/org/texts@{COMMIT}" in str(token_files(mirrored))
    sent = sum(stop - start for _, start, stop in hub.sent_ranges)
    assert sent == bytes_of(hub)


@pytest.fixture
def thread_hosts(monkeypatch):
    """Each thread of the name "N..." is a host."""

    def own_name() -> str:
        return threading.current_thread().name

    monkeypatch.setattr(hosts, "_own_name", own_name)


def run(folder: pathlib.Path, names: list[str], **cache) -> list[Dataset]:
    """Open the data on several hosts, which are threads here."""
    agreements = members(len(names))
    found: dict[str, Dataset | Exception] = {}

    def act(rank: int) -> None:
        own = config(folder / names[rank], **cache)
        try:
            with remote_hosts.shared(own, agreements[rank]) as files:
                found[names[rank]] = agreements[rank].together(
                    lambda: open_dataset(own, seed=0, remote=files)
                )
        except Exception as error:
            found[names[rank]] = error

    threads = [
        threading.Thread(target=act, args=(rank,), name=name)
        for rank, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in found.values():
        if isinstance(outcome, Exception):
            raise outcome
    return [opened for opened in found.values() if isinstance(opened, Dataset)]


def test_hosts_read_each_remote_byte_once_and_go_on_without_one_of_them(
    hub, tmp_path, thread_hosts
):
    names = ["a", "b", "c", "d"]
    opened = run(tmp_path, names, replicas=2)
    assert len({dataset.fingerprint for dataset in opened}) == 1
    times = collections.Counter(hub.sent_ranges)
    assert set(times.values()) == {1}
    assert sum(stop - start for _, start, stop in times) == bytes_of(hub)
    kept = [len([*(tmp_path / name / "blocks").glob("*.block")]) for name in names]
    assert sum(kept) == 2 * len(times)
    shutil.rmtree(tmp_path / "b")
    for name in ("a", "c", "d"):
        shutil.rmtree(tmp_path / name / "tokens")  # all text is read again
    hub.status = 503
    again = run(tmp_path, ["c", "d", "a"], replicas=2)
    assert {dataset.fingerprint for dataset in again} == {opened[0].fingerprint}


def test_two_processes_find_each_other_and_read_the_hub_once(hub, tmp_path):
    coordinator = f"127.0.0.1:{free_port()}"
    peer = pathlib.Path(__file__).with_name("remote_peer.py")
    environment = clean_environment()
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    started = []
    for rank, name in enumerate("ab"):
        folder = tmp_path / name
        folder.mkdir()
        own = {"MJAX_HOST": name, "HF_HUB_CACHE": str(folder / "hub")}
        words = [str(rank), coordinator, str(folder), PATH]
        started.append(
            subprocess.Popen(
                [sys.executable, str(peer), *words],
                env=environment | own,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    reports = [json.loads((tmp_path / name / "report").read_text()) for name in "ab"]
    assert reports[0] == reports[1]
    plain = open_dataset(without_mirror(tmp_path / "plain"), seed=0)
    assert reports[0]["fingerprint"] == plain.fingerprint
    assert set(collections.Counter(hub.sent_ranges).values()) == {1}


def test_an_address_without_a_port_is_said():
    with pytest.raises(RuntimeError, match=r"a port on its address 192.0.2.1 .*mirror"):
        remote_hosts._listen("192.0.2.1")  # no machine has it


def test_without_the_hub_complete_token_files_are_read(hub, tmp_path, caplog):
    whole = open_dataset(config(tmp_path), seed=0)
    hub.status = 503
    assert open_dataset(config(tmp_path), seed=0).fingerprint == whole.fingerprint
    assert f"reading the copy of commit {COMMIT}" in caplog.text


def test_a_hub_that_stops_is_said_and_the_next_start_goes_on(hub, tmp_path):
    hub.cut.add("sub/b.txt")
    with pytest.raises(
        ValueError,
        match=r"cannot read bytes 0 to 90 of hf://datasets/org/texts@.*/sub/b.txt from "
        r"the remote in 4 tries .*; start again when the remote can be reached",
    ):
        open_dataset(config(tmp_path), seed=0)
    hub.cut.clear()
    hub.sent_ranges.clear()
    open_dataset(config(tmp_path), seed=0)
    assert hub.sent_ranges == [("sub/b.txt", 0, 90)]


def test_a_file_that_is_not_what_the_hub_states_is_refused(hub, tmp_path):
    for name in ("a.jsonl", "sub/b.txt"):
        content = bytearray(hub.files[name])
        content[20] ^= 1
        hub.damage = {name: bytes(content)}
        own = config(tmp_path / name.replace("/", "-"))
        with pytest.raises(ValueError, match=rf"{name} has the .* instead of .*remov"):
            open_dataset(own, seed=0)
        hub.damage = {}
        open_dataset(own, seed=0)


def test_bytes_that_differ_from_those_of_an_earlier_start_are_refused(hub, tmp_path):
    whole = open_dataset(config(tmp_path), seed=0)
    shutil.rmtree(tmp_path / "tokens")
    for path in (tmp_path / "blocks").glob("*.block"):
        path.unlink()
    content = bytearray(hub.files["sub/b.txt"])
    content[20] ^= 1
    hub.damage = {"sub/b.txt": bytes(content)}
    with pytest.raises(
        ValueError,
        match=f"host {socket.gethostname()} cannot read bytes 0 to 90 of hf://.*/sub/b"
        ".txt .*it sent other bytes than those that were checked before",
    ):
        open_dataset(config(tmp_path), seed=0)
    hub.damage = {}
    assert open_dataset(config(tmp_path), seed=0).fingerprint == whole.fingerprint


def test_a_gated_data_set_is_refused_at_once(hub, tmp_path):
    hub.gated.add("a.jsonl")
    with pytest.raises(ValueError, match=r"who accepted its terms; .*HF_TOKEN"):
        open_dataset(config(tmp_path), seed=0)
    assert len([asked for asked in hub.asked if "a.jsonl" in asked]) == 1


def test_a_limit_below_the_share_is_said_and_reading_goes_on(
    hub, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(remote, "_GIB", 1 << 14)  # one GiB is 16 KiB here
    opened = open_dataset(config(tmp_path, limit_gib=1 / 16), seed=0)
    assert "limit-gib 0.0625 is below the" in caplog.text
    kept = sum(p.stat().st_size for p in (tmp_path / "blocks").glob("*.block"))
    assert kept <= 1024 < bytes_of(hub)
    plain = open_dataset(without_mirror(tmp_path / "plain"), seed=0)
    assert opened.fingerprint == plain.fingerprint


def test_a_folder_that_cannot_be_made_is_refused(hub, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"blocks .* cannot be made .*mirror-dir"):
        open_dataset(config(tmp_path / "file"), seed=0)


def test_the_folder_can_be_counted_and_emptied(hub, tmp_path, capsys):
    prepare_files(config(tmp_path))
    folder = str(tmp_path / "blocks")
    assert command.main(["mirror", "status", folder]) == 0
    num_blocks = len({(name, start) for name, start, _ in hub.sent_ranges})
    assert f"blocks                 {num_blocks}\n" in capsys.readouterr().out
    assert command.main(["mirror", "purge", folder]) == 0
    assert not [*(tmp_path / "blocks").glob("*.block")]


def test_a_mirror_without_remote_data_is_said(tmp_path, corpus, caplog):
    own = dataclasses.replace(config(tmp_path), path=(str(corpus),))
    with caplog.at_level(logging.WARNING):
        open_dataset(own, seed=0)
    assert "no effect: no --data.path is remote" in caplog.text
    assert not (tmp_path / "blocks").exists()


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"replicas": 2}, r"--data.cache.replicas 2 needs --data.cache.mirror-dir"),
        ({"mib_per_s": 5.0}, r"--data.cache.mib-per-s 5.0 needs"),
        ({"mirror_dir": ""}, r"--data.cache.mirror-dir must be a folder .* got ''"),
        ({"mirror_dir": "s3://b/c"}, r"must be a folder .* got 's3://b/c'; for exam"),
        ({"mirror_dir": "d", "replicas": 0}, r"replicas must be at least 1, got 0"),
        (
            {"mirror_dir": "d", "limit_gib": 0.01},
            r"limit-gib must .*0\.0625 .*0\.01",
        ),
        ({"mirror_dir": "d", "limit_gib": float("nan")}, r"limit-gib must be .* nan"),
        ({"mirror_dir": "d", "mib_per_s": 0.0}, r"mib-per-s must be above 0, got 0.0"),
    ],
)
def test_bad_values_are_refused_by_name(cache, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**cache)


def test_machines_with_one_name_are_told_apart():
    found = [
        {"name": "node", "boot": boot, "address": "10.0.0.1"}
        for boot in ("x", "x", "y")
    ]
    assert hosts._names(found) == ["node/x", "node/x", "node/y"]
    assert hosts._names(found[:2]) == ["node", "node"]
