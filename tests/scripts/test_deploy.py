"""The image and the batch scripts: linted, and their commands are ours."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.doctor import command as doctor
from scripts import image_steps

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(DEPLOY.glob("**/*.sbatch")) + sorted(DEPLOY.glob("**/*.sh"))
TOOLS = Path(sys.executable).parent


def lint(*words):
    done = subprocess.run(
        [TOOLS / words[0], *words[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_is_linted():
    lint("hadolint", DEPLOY / "Dockerfile")


def test_scripts_are_linted():
    assert len(SCRIPTS) == 3
    lint("shellcheck", "-x", *SCRIPTS)


def test_what_the_image_copies_is_not_ignored_and_is_there():
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for name, words in image_steps.instructions((DEPLOY / "Dockerfile").read_text())
        if name == "COPY" and not words.startswith("--from")
        for source in words.split()[:-1]
    ]
    assert {source.split("/")[0] for source in copied} == {*kept}
    for source in copied:
        assert (ROOT / source).exists(), source


def test_the_image_is_for_the_user_of_the_pods_and_starts_the_doctor():
    steps = dict(image_steps.instructions((DEPLOY / "Dockerfile").read_text()))
    jobset = (DEPLOY / "kubernetes" / "jobset.yaml").read_text()
    assert f"runAsUser: {steps['USER'].split(':')[0]} " in jobset
    words = json.loads(steps["CMD"])
    assert words[:2] == ["mjax", "doctor"]
    doctor.flags.read(doctor.DoctorFlags, words[2:], prog="doctor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN true", "RUN before FROM"),
        ("FROM debian", "only FROM ${BASE} is known"),
        ("VOLUME /x", "VOLUME before FROM"),
        ("# nothing", "there is no FROM"),
    ],
)
def test_a_step_that_is_not_known_is_refused(text, message, tmp_path):
    with pytest.raises(ValueError, match=message.replace("$", r"\$")):
        image_steps.take(text, tmp_path / "base", tmp_path / "out", ROOT)


def test_stages_copy_files_and_set_variables(tmp_path):
    base, out, context = (tmp_path / name for name in ("base", "out", "context"))
    for folder in (base / "etc", out, context / "code"):
        folder.mkdir(parents=True)
    (context / "code" / "a.py").write_text("1")
    (context / "one").write_text("2")
    text = (
        "FROM ${BASE} AS build\nWORKDIR /src\nCOPY one ./\nCOPY code code\n"
        "FROM ${BASE}\nCOPY --from=build /src /opt/it\n"
        "ENV PATH=/opt/it:$PATH \\\n  A=b\nUSER 7:8\n"
    )
    stage = image_steps.take(text, base, out, context)
    assert (stage.root / "opt" / "it" / "code" / "a.py").read_text() == "1"
    assert (stage.root / "opt" / "it" / "one").read_text() == "2"
    assert stage.env["PATH"].startswith("/opt/it:/usr/local/sbin:")
    assert (stage.env["A"], stage.user) == ("b", "7:8")
    assert (base / "etc").is_dir()


def has_mounts() -> bool:
    """Return whether this process may mount in a namespace of its own."""
    if os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "--mount", "true"]).returncode == 0


@pytest.fixture(scope="module")
def bash_only(tmp_path_factory) -> Path:
    """The root of a file system that has bash, its libraries, /proc and /dev."""
    root = tmp_path_factory.mktemp("base")
    for name in ("bin", "dev", "etc", "proc", "tmp"):
        (root / name).mkdir()
    shutil.copy("/bin/bash", root / "bin" / "bash")
    printed = subprocess.check_output(["ldd", "/bin/bash"], text=True)
    for library in re.findall(r"(/\S+) \(", printed):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    return root


@pytest.mark.skipif(not has_mounts(), reason="needs root and the right to mount")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("[[ -e /proc/self/status && -c /dev/null ]]", 0),
        ("exit 7", 1),
        ("kill -INT 0; for ((i = 0; i < 10**7; i++)); do :; done", -2),
        ("kill -KILL $PPID", -9),
    ],
)
def test_a_step_leaves_no_mount_however_it_ends(command, code, bash_only, tmp_path):
    # A process that was started in the background ignores SIGINT, as would this one.
    step = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\n"
        "from scripts.image_steps import Stage\n"
        f"stage = Stage(Path({str(bash_only)!r}), Path({str(tmp_path / 'root')!r}))\n"
        f"stage.run(['/bin/bash', '-c', {command!r}])\n"
    )
    # In a namespace of the test: a mount that is left does not reach this machine.
    program = (
        "import pathlib, subprocess, sys\n"
        f"step = [sys.executable, '-c', {step!r}]\n"
        "print(subprocess.run(step, start_new_session=True).returncode)\n"
        "print(pathlib.Path('/proc/self/mounts').read_text())\n"
    )
    words = ["unshare", "--mount", sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    ended, _, mounts = done.stdout.partition("\n")
    assert int(ended) == code, done.stderr
    assert " /proc " in mounts
    assert str(tmp_path) not in mounts
