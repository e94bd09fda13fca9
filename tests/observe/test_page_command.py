"""`python -m mjax.observe serve` says what is wrong, prints its address, and ends."""

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mjax.observe import serve
from tests.observe import page_runs
from tests.observe.page_runs import Rank


def refused(capsys, *argv: str) -> str:
    """Return the line with which the command refuses."""
    assert serve.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    line = refused(capsys, "--work-dir", str(tmp_path / "file"))
    assert "is not a folder" in line


def test_a_folder_whose_parent_does_not_exist_is_refused(tmp_path, capsys):
    line = refused(capsys, "--work-dir", str(tmp_path / "no" / "run"))
    assert f"mkdir -p {tmp_path / 'no'} to wait" in line


def test_a_folder_with_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "notes").touch()
    assert "has no spans and no run" in refused(capsys, "--work-dir", str(tmp_path))


def test_a_folder_that_a_run_will_create_or_fill_is_awaited(tmp_path, monkeypatch):
    assert "is empty; the page shows" in serve.check_work_dir(tmp_path)
    told = f"--work-dir {tmp_path / 'run'} does not exist yet; the page shows the run"
    assert serve.check_work_dir(tmp_path / "run").startswith(told)
    monkeypatch.chdir(tmp_path)
    assert "does not exist yet" in serve.check_work_dir(Path("run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir()  # what a trainer creates first
    assert serve.check_work_dir(tmp_path / "run") == ""
    serve.check_run(tmp_path / "run", None)


def test_a_run_without_spans_is_refused_with_the_flag_that_helps(tmp_path, capsys):
    page_runs.write_rows(tmp_path, 1, 3)
    assert "--spans-dir" in refused(capsys, "--work-dir", str(tmp_path))


def test_a_run_that_has_just_begun_is_not_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    serve.check_run(tmp_path, None)


def test_spans_in_another_folder_count(tmp_path):
    Rank(tmp_path / "elsewhere").steps(1, 1)
    (tmp_path / "work").mkdir()
    page_runs.write_rows(tmp_path / "work", 1, 3)
    serve.check_run(tmp_path / "work", tmp_path / "elsewhere" / "spans")


def test_a_port_in_use_is_refused(tmp_path, capsys):
    Rank(tmp_path).steps(1, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = f"127.0.0.1:{port}"
        line = refused(capsys, "--work-dir", str(tmp_path), "--listen", listen)
    assert f"--listen {listen}: the port is in use" in line
    assert f"--listen 127.0.0.1:{port + 1}" in line


@pytest.mark.parametrize(
    ("listen", "said"),
    [("7450", "must be HOST:PORT"), ("192.0.2.1:0", "cannot be used")],
)
def test_an_address_that_cannot_be_is_refused(tmp_path, capsys, listen, said):
    Rank(tmp_path).steps(1, 1)
    assert said in refused(capsys, "--work-dir", str(tmp_path), "--listen", listen)


def test_an_unknown_flag_is_refused(tmp_path, capsys):
    line = refused(capsys, "--work-dir", str(tmp_path), "--port", "1")
    assert "--port" in line


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_of_a_file_is_taken(tmp_path):
    token = "ab-._~" * 4
    assert serve.read_token(token_file(tmp_path, token + "\n")) == token


def test_a_token_that_is_made_is_a_new_one_each_time():
    found = {serve.read_token(None) for _ in range(3)}
    assert len(found) == 3
    assert {len(token) for token in found} == {32}


@pytest.mark.parametrize("text", ["", "short", "two words of a token", "a;b" * 9])
def test_a_token_that_viewers_could_not_send_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="one word of 16 to 256"):
        serve.read_token(token_file(tmp_path, text))


def test_a_token_that_others_may_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="chmod 600"):
        serve.read_token(token_file(tmp_path, "a" * 20, 0o644))


def test_a_token_file_that_is_absent_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        serve.read_token(tmp_path / "no")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_address_once_and_ends_with_0_on_a_signal(tmp_path, number):
    work_dir = tmp_path / "run"  # one signal arrives before the run, one after it
    if number == signal.SIGTERM:
        page_runs.write_run(work_dir, ranks=(0,))
    argv = ["serve", "--work-dir", str(work_dir), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "mjax.observe", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        token = address.partition("token=")[2]
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{address}0", timeout=20)
        api = urllib.request.Request(
            address.partition("?")[0] + "live",
            headers={"Authorization": f"Bearer {token}"},
        )
        with urllib.request.urlopen(api, timeout=20) as stream:
            assert stream.readline().startswith(b"retry")
            process.send_signal(number)
            rest, said = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")
    assert token not in said
    waits = f"--work-dir {work_dir} does not exist yet; the page shows the run once it"
    assert said == ("" if number == signal.SIGTERM else f"{waits} starts\n")
