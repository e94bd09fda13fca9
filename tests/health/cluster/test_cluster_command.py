"""`health cluster` from its flags to its exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from mjax.health.cluster.command import expectations, main
from mjax.health.settings import read_expected
from tests.health.cluster.fabrics import FILE, Fabric, cluster, exchange, links_of


@pytest.fixture
def cluster_path(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


def dump(tmp_path: Path, *exchanged: str) -> Path:
    made = cluster()
    links = links_of(made)
    if exchanged:
        exchange(links, *exchanged)
    path = tmp_path / "links.txt"
    path.write_bytes(b"".join(Fabric(cluster=made, links=links).iblinkinfo()))
    return path


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_file_alone_is_checked_and_that_is_said(capsys, cluster_path: Path):
    code, out, _ = run(capsys, "check", "--cluster", cluster_path)
    assert code == 0
    assert "checked only the file" in out


def test_a_fabric_as_in_the_file_ends_with_0(capsys, cluster_path: Path, tmp_path):
    words = ["check", "--cluster", cluster_path, "--fabric-dump", dump(tmp_path)]
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert out == "small: ok, 0 findings, 32 of 32 cables in their places\n"
    code, out, _ = run(capsys, *words, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)


def test_an_exchange_ends_with_1_and_is_named(capsys, cluster_path: Path, tmp_path):
    path = dump(tmp_path, "gpu01:mlx5_0", "gpu02:mlx5_0")
    words = ["check", "--cluster", cluster_path, "--fabric-dump", path]
    code, out, _ = run(capsys, *words)
    assert code == 1
    assert "gpu01:mlx5_0 goes to leaf1:2" in out
    code, out, _ = run(capsys, *words, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["verdict"]) == (1, False, "failed")
    assert found["findings"][0]["nodes"] == ["gpu01", "leaf1", "gpu02"]


def test_a_dump_that_was_cut_off_ends_with_1(capsys, cluster_path: Path, tmp_path):
    path = dump(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    code, out, _ = run(
        capsys, "check", "--cluster", cluster_path, "--fabric-dump", path
    )
    assert code == 1
    assert "incomplete" in out
    assert "ends in the middle of line" in out


def test_what_nodes_say_of_themselves_does_not_reach_the_terminal(
    capsys, cluster_path: Path, tmp_path: Path
):
    path = dump(tmp_path)
    text = path.read_bytes().replace(b'"leaf1"', b'"\x1b[31mleaf1"')
    path.write_bytes(text)
    _, out, _ = run(capsys, "check", "--cluster", cluster_path, "--fabric-dump", path)
    assert "leaf1" in out
    assert "\x1b" not in out


def reports(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "reports"
    folder.mkdir()
    for host in cluster().hosts:
        check = {"name": "gpu.count", "state": "ok", "value": "2", "reason": ""}
        found = {"host": host, "checks": [check | changes]}
        (folder / f"{host}.json").write_text(json.dumps(found))
    return folder


def test_reports_of_hosts_are_compared(capsys, cluster_path: Path, tmp_path: Path):
    folder = reports(tmp_path)
    words = ["check", "--cluster", cluster_path, "--reports", folder]
    assert run(capsys, *words)[:2] == (0, "small: ok, 0 findings\n")
    (folder / "gpu03.json").write_text('{"host": "gpu03", "che')
    code, out, _ = run(capsys, *words)
    assert code == 1
    assert "gpu03.json is not a report of health check --json" in out


def test_a_placement_is_json(capsys, cluster_path: Path):
    words = ["place", "--cluster", cluster_path, "--dp", 8, "--json"]
    code, out, _ = run(capsys, *words, "--hosts", "gpu[01-06]")
    found = json.loads(out)
    assert code == 0
    assert found["hosts"] == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert found["spares"] == ["gpu05", "gpu06"]
    assert found["score"]["total"] == 0
    assert {*found["null"]} == {"file_order", "random"}
    code, out, err = run(capsys, "place", "--cluster", cluster_path, "--dp", 16)
    assert (code, len(out.split())) == (0, 8)
    assert "cross a leaf" in err


def test_expectations_of_a_host_are_read_by_health_check(
    capsys, tmp_path: Path, cluster_path: Path
):
    extra = '"small"\nrequire = ["gpu.count"]\nversions = { "nvidia_driver" = "580" }'
    cluster_path.write_text(FILE.replace('"small"', extra))
    words = ["expect", "--cluster", cluster_path, "--host"]
    code, out, _ = run(capsys, *words, "gpu01")
    assert code == 0
    path = tmp_path / "expect.toml"
    path.write_text(out)
    found = read_expected(path, ["gpu.count"])
    assert found == {
        "gpus": 2,
        "require": ["gpu.count"],
        "ports": 2,
        "port_rate_gbps": 400,
        "versions": {"nvidia_driver": "580"},
    }
    assert json.loads(run(capsys, *words, "gpu01", "--json")[1]) == found
    code, _, err = run(capsys, *words, "cpu1")
    assert (code, "--host cpu1: the cluster file has no such host" in err) == (2, True)


def test_an_ethernet_port_beside_infiniband_is_not_expected():
    """`infiniband.ports` would fail a healthy host: eth0 is no RDMA port."""
    nic = '{ name = "mlx5_1", rail = 1, rate_gbps = 400 }'
    eth = '{ name = "eth0", fabric = "ethernet", rate_gbps = 25 }'
    text = FILE.replace(f"{nic}]", f"{nic}, {eth}]")
    text += (
        '[[switches]]\nnames = "tor1"\ntier = "leaf"\nports = 8\n'
        'fabric = "ethernet"\n[[cables]]\nends = ["gpu[01-08]:eth0", "tor1:[1-8]"]\n'
    )
    assert text.count("eth0") == 3
    found = expectations(cluster(text), "gpu01")
    assert (found["ports"], found["port_rate_gbps"]) == (2, 400)


def test_a_cluster_is_shown(capsys, cluster_path: Path):
    code, out, _ = run(capsys, "show", "--cluster", cluster_path)
    assert code == 0
    assert "8 hosts with 16 GPUs" in out
    assert "leaf1, leaf2: 4 hosts, gpu01, gpu02, gpu03 and 1 more" in out
    found = json.loads(run(capsys, "show", "--cluster", cluster_path, "--json")[1])
    assert (found["cables"], found["switches"]) == (32, {"leaf": 4, "spine": 2})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["check", "--cluster", "none.toml"], "none.toml cannot be read"),
        (["check", "--cluster", "{c}", "--fabric-dump", "none"], "--fabric-dump none"),
        (["check", "--cluster", "{c}", "--fabric-dump", "/"], "--fabric-dump /"),
        (
            ["check", "--cluster", "{c}", "--lldp", "none"],
            "--lldp none is not a folder",
        ),
        (["check", "--cluster", "{c}", "--reports", "{t}"], "has no file HOST.json"),
        (["check", "--cluster", "{c}", "--switches-only"], "give both"),
        (["place", "--cluster", "{c}", "--dp", "3"], "must be a multiple of the 2 GPU"),
        (["place", "--cluster", "{c}", "--hosts", "gpu[1-"], "without its partner"),
        (["place", "--cluster", "{c}", "--pp", "0"], "--pp must be at least 1, got 0"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    capsys, cluster_path: Path, tmp_path: Path, words: list[str], told: str
):
    filled = [word.format(c=cluster_path, t=tmp_path) for word in words]
    code, out, err = run(capsys, *filled)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told in err


@pytest.mark.parametrize("words", [[], ["chekc"], ["check"], ["place", "--pp", "x"]])
def test_flags_that_are_written_wrong_end_with_2(capsys, words: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
