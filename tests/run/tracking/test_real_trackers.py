"""Runs that are tracked by wandb, offline, and by an MLflow server on this machine.

Both are installed in an environment of their own, `.venv-track` or
`$MJAX_TRACK_PYTHON`, which runs mjax too.
"""

import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mjax.run.metrics import read_rows

pytestmark = pytest.mark.track

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get(
    "MJAX_TRACK_PYTHON", str(ROOT / ".venv-track" / "bin" / "python")
)
SMALL = [
    *("--recipe", "debug", "--simulate-devices", "1", "--mesh.dp", "1"),
    *("--mesh.tp", "1", "--mesh.pp", "1", "--ckpt.every", "2", "--ckpt.keep", "9"),
]
READ_WANDB = """
import json, sys
from wandb.proto import wandb_internal_pb2 as wandb
for line in sys.stdin:
    record = wandb.Record()
    record.ParseFromString(bytes.fromhex(line))
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = {item.key or item.nested_key[0]: json.loads(item.value_json)
                 for item in record.history.item}
        print(json.dumps(items))
    elif kind == "run":
        print(json.dumps({"id": record.run.run_id, "name": record.run.display_name}))
    elif kind == "exit":
        print(json.dumps({"exit": record.exit.exit_code}))
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(PYTHON, "-m", "mlflow", "server", "--port", str(port)),
                *("--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/db"),
                *("--artifacts-destination", str(folder / "artifacts")),
            ],
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    until_s = time.monotonic() + 180
    while time.monotonic() < until_s and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    yield address
    process.terminate()
    process.wait(60)


def train(*flags: str, **variables: str) -> str:
    done = subprocess.run(
        [PYTHON, "-m", "mjax.train", *flags],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def asked(address: str, what: str, **question: Any) -> Any:
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/{what}",
        json.dumps(question).encode() if question else None,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def records(data: bytes) -> Iterator[bytes]:
    """Read the records of a wandb file: a LevelDB log after 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield record
            record = b""


def wandb_records(path: Path) -> list[dict[str, Any]]:
    lines = "\n".join(record.hex() for record in records(path.read_bytes()))
    done = subprocess.run(
        [PYTHON, "-c", READ_WANDB],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def run(server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 6 steps that went back to step 2 and then on to step 8."""
    work_dir = tmp_path_factory.mktemp("runs") / "mine"
    variables = {"MLFLOW_TRACKING_URI": server, "WANDB_MODE": "offline"}
    trackers = ["--track", "wandb", "mlflow", "tensorboard"]
    train(*SMALL, *trackers, "--steps", "6", "--work-dir", str(work_dir), **variables)
    for saved in (work_dir / "checkpoints").glob("[3-9]"):
        shutil.rmtree(saved)
    said = train("--work-dir", str(work_dir), "--steps", "8", **variables)
    return work_dir, said


def test_a_run_is_one_run_of_mlflow_with_each_step_once(
    server: str, run: tuple[Path, str]
) -> None:
    work_dir, said = run
    experiment = asked(server, "experiments/get-by-name?experiment_name=mjax")
    number = experiment["experiment"]["experiment_id"]
    found = asked(server, "runs/search", experiment_ids=[number])["runs"]
    assert [one["info"]["run_name"] for one in found] == ["mine"]
    assert found[0]["info"]["status"] == "FINISHED"
    params = {one["key"]: one["value"] for one in found[0]["data"]["params"]}
    tags = {one["key"]: one["value"] for one in found[0]["data"]["tags"]}
    assert (params["optim.lr"], params["steps"], tags["steps"]) == ("0.005", "6", "8")
    run_id = found[0]["info"]["run_id"]
    losses = asked(server, f"metrics/get-history?run_id={run_id}&metric_key=loss")[
        "metrics"
    ]
    assert [point["step"] for point in losses] == [*range(1, 9)]
    rows = read_rows(work_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert losses[6]["value"] == pytest.approx(rows[6]["loss"], rel=1e-12)
    assert said.count("mlflow: steps 3 to 6 were sent before the run went back") == 1


def test_a_run_is_one_run_of_wandb_with_each_step_once(run: tuple[Path, str]) -> None:
    work_dir, said = run
    first, second = map(
        wandb_records, sorted(work_dir.glob("wandb/offline-run-*/*.wandb"))
    )
    identity = json.loads((work_dir / "starts" / "0001.json").read_text())["run"]
    assert first[0] == second[0] == {"id": identity, "name": "mine"}
    assert [row["_step"] for row in first if "_step" in row] == [*range(1, 7)]
    assert [row["_step"] for row in second if "_step" in row] == [7, 8]
    assert first[-1] == second[-1] == {"exit": 0}
    assert "loss" in second[1]
    assert said.count("wandb: steps 3 to 6 were sent before the run went back") == 1


def test_tensorboard_has_a_file_for_each_start(run: tuple[Path, str]) -> None:
    work_dir, _ = run
    assert len([*(work_dir / "tensorboard").glob("events.out.tfevents.*")]) == 2


def test_services_that_are_down_are_told_once_and_stop_nothing(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    said = train(
        *SMALL,
        *("--track", "wandb", "mlflow", "--steps", "6"),
        *("--work-dir", str(tmp_path / "run")),
        MLFLOW_TRACKING_URI=nobody,
        WANDB_BASE_URL=nobody,
        WANDB_API_KEY="0" * 40,
        WANDB_MODE="online",
    )
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 7)]
    for name in ("wandb", "mlflow"):
        assert said.count(f"warning: {name}: 6 rows were not sent") == 1
        assert said.count(f"{name} does not accept the metrics") <= 1
    assert ": done" in said
