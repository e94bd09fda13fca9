"""Two jax processes that upload the files of one step, and restore it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.ckpt.remote import transfer
from mjax.ckpt.remote.link import opened
from mjax.ckpt.remote.steps import RemoteSteps
from tests.processes.test_distributed import LIMIT_S, clean_environment, free_port
from tests.stores.servers import S3Server, s3_server, s3_url

__all__ = ["s3_server", "s3_url"]

PROGRAM = Path(__file__).with_name("upload_from_process.py")


@pytest.mark.stores
def test_two_processes_upload_one_step_and_restore_it_from_the_store(
    s3_server: S3Server, s3_url: str, tmp_path: Path
):
    port = str(free_port())
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), rank, "2", port, str(tmp_path), s3_url],
            env=clean_environment() | s3_server.variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    first, second = [json.loads(output.splitlines()[-1]) for output in outputs]
    for report in (first, second):
        assert report["is_saved"]
        assert report["missing"] == ""
        assert (report["newest"], report["restored"]) == (5, 5)
        assert f"copied from {s3_url}" in report["source"]
        assert report["is_same"]
    assert [len(first["told"]), len(second["told"])] == [1, 0]
    commit = RemoteSteps(opened(s3_url)).commit(5)
    assert sorted(first["sent"] + second["sent"]) == sorted(commit.files)
    assert second["sent"] == transfer.share(commit.files, 1, 2)
    assert len(second["sent"]) > 1
    assert os.listdir(tmp_path / "second" / "checkpoints") == ["5"]
