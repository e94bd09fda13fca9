"""Run the steps of a Dockerfile in a folder, without a container engine.

    debootstrap --variant=minbase trixie /tmp/base
    python -m scripts.image_steps --base /tmp/base --out /tmp/image -- mjax --version

Input: the root of a file system for the base image. Output: that of the last stage in
OUT, in which the command after -- is run as the image's user. Needs root; the commands
of RUN see only this machine's network and certificates. Only the instructions and forms
of deploy/Dockerfile are supported; others are an error.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
_CERTIFICATES = "/tmp/certificates.crt"
_NETWORK = {
    "/etc/resolv.conf": "/etc/resolv.conf",
    "/etc/hosts": "/etc/hosts",
    "/etc/ssl/certs/ca-certificates.crt": _CERTIFICATES,
}
"""Files of this machine, and their destinations."""
_MOUNTS = ("proc", "dev")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction and its words, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, words = line.strip().partition(" ")
            yield name.upper(), words.strip()


class Stage:
    """A file system, and its settings from the instructions so far."""

    def __init__(self, base: Path, root: Path) -> None:
        """Copy the base."""
        subprocess.run(["cp", "-a", "--reflink=auto", base, root], check=True)
        self.root = root
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/bin"}
        self.folder, self.user = "/", "0:0"

    def run(self, command: Sequence[str]) -> None:
        """Run a command in it.

        Raises:
          CalledProcessError: its exit code is not 0, or mounting is not allowed.
        """
        for path, inner in _NETWORK.items():
            if Path(path).exists():
                shutil.copyfile(path, self.root / inner.lstrip("/"))
        uid, _, gid = self.user.partition(":")
        # The mounts are in a namespace of the command, which ends with it, even if this
        # program is killed. None reaches the folder outside of it.
        mounts = "".join(f'mount --rbind /{name} "$0/{name}" && ' for name in _MOUNTS)
        words = ["unshare", "--mount", "/bin/bash", "-c", f'{mounts}exec "$@"']
        words += [str(self.root), "chroot", f"--userspec={uid}:{gid or uid}"]
        inner = f"cd {shlex.quote(self.folder)} && exec {shlex.join(command)}"
        words += [str(self.root), "/bin/bash", "-c", inner]
        given = {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
        given["PIP_CERT"] = _CERTIFICATES
        env = given | {"HOME": "/root" if uid == "0" else "/tmp"} | self.env
        subprocess.run(words, check=True, env=env)

    def set(self, name: str, value: str) -> None:
        """Set a variable, as ENV does."""
        self.env[name] = _VARIABLE.sub(lambda found: self.env[found[1]], value)

    def copy(self, sources: Sequence[str], target: str, origin: Path) -> None:
        """Copy files into it, as COPY does; of a folder, its contents."""
        place = self.root / os.path.join(self.folder, target).lstrip("/")
        for source in sources:
            path = origin / source.lstrip("/")
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(
                    path, place, dirs_exist_ok=True, symlinks=True, ignore=ignore
                )
            else:
                inner = place / path.name if target.endswith("/") else place
                inner.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, inner)


def take(text: str, base: Path, out: Path, context: Path) -> Stage:
    """Run all steps; return the last stage.

    Raises:
      ValueError: an instruction is not supported.
      CalledProcessError: a command of RUN failed.
    """
    stages: dict[str, Stage] = {}
    stage = None
    for name, words in instructions(text):
        print(f"{name} {words}", flush=True)
        if name == "FROM":
            image, *named = shlex.split(words)
            if image != "${BASE}":
                raise ValueError(f"FROM {image}: only FROM ${{BASE}} is known here")
            label = named[-1] if named else f"stage-{len(stages)}"
            stage = stages[label] = Stage(base, out / label)
        elif name in ("ARG", "SHELL", "CMD"):
            continue  # BASE is given here, and RUN always has bash
        elif stage is None:
            raise ValueError(f"{name} before FROM")
        elif name == "RUN":
            stage.run(["/bin/bash", "-o", "pipefail", "-c", words])
        elif name == "WORKDIR":
            stage.folder = words
            (stage.root / words.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            stage.user = words
        elif name == "ENV":
            for pair in shlex.split(words):
                stage.set(*pair.split("=", 1))
        elif name == "COPY":
            *sources, target = shlex.split(words)
            origin = context
            if sources[0].startswith("--from="):
                origin = stages[sources.pop(0).removeprefix("--from=")].root
            stage.copy(sources, target, origin)
        else:
            raise ValueError(f"{name} is not known here")
    if stage is None:
        raise ValueError("there is no FROM")
    return stage


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps, then the command; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="root of the base")
    parser.add_argument("--out", type=Path, required=True, help="a folder to make")
    parser.add_argument("command", nargs="*", help="run in what has been made")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True)
    stage = take(DOCKERFILE.read_text(), args.base, args.out, ROOT)
    command = args.command or json.loads(
        dict(instructions(DOCKERFILE.read_text()))["CMD"]
    )
    print(f"as {stage.user}: {shlex.join(command)}", flush=True)
    stage.run(command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
