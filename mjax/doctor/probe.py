"""Collect facts about this host: `python -m mjax.doctor.probe KIND [WORDS]`.

Output: one JSON object on stdout, the facts, which a check judges. Each kind of facts
is collected in its own process, because a broken library may crash the process and a
network file system may block it for ever. At first only the standard library is
imported; each kind imports further modules itself.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

_NVIDIA = Path("/proc/driver/nvidia")
_NUM_BYTES = 2**20
"""Bytes written to test a folder. It is more than a page, and the write is fast."""
_CONNECT_S = 5.0
"""Timeout of a connection to an address. It is far more than a round trip between two
hosts."""


def packages() -> dict[str, Any]:
    """Return the requirements of mjax and the installed versions.

    Returns:
      python: version of the interpreter; requires_python: version that mjax requires.
      required: list of [requirement, installed version or null], for each package that
        mjax always needs.
      extras: name of an extra -> its list of [requirement, installed version or null].
      jaxlib: version of jaxlib; plugins: package name of a CUDA plugin of jax ->
        version.
    """
    about = importlib.metadata.metadata("mjax")
    names = about.get_all("Provides-Extra") or []
    return {
        "python": platform.python_version(),
        "requires_python": about["Requires-Python"],
        "required": _wanted("mjax", ""),
        "extras": {name: _wanted("mjax", name) for name in names},
        "jaxlib": _version("jaxlib"),
        "plugins": _plugins(),
    }


def _wanted(package: str, extra: str) -> list[tuple[str, str | None]]:
    """Return each required package as (requirement, installed version or None).

    Args:
      package: name of an installed package.
      extra: name of one of its extras; "": the packages that it always requires.
    """
    from packaging.requirements import Requirement

    found = []
    for line in importlib.metadata.requires(package) or []:
        wanted = Requirement(line)
        is_always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        is_meant = wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        if not is_meant or (extra and is_always):
            continue
        version = _version(wanted.name)
        found.append((f"{wanted.name}{wanted.specifier}", version))
        if version is not None:
            for inner in sorted(wanted.extras):
                found += _wanted(wanted.name, inner)
    return found


def _plugins() -> dict[str, str]:
    """Return the version of each installed CUDA plugin of jax, by package name."""
    names = [f"jax-cuda{major}-plugin" for major in (12, 13)]
    return {name: found for name in names if (found := _version(name)) is not None}


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def devices() -> dict[str, Any]:
    """Start jax and compute a matmul on each device of this host.

    Returns:
      platform; kinds (device kind of each device); seconds (the time that it took);
      plugins (as in `packages`); driver (version of the NVIDIA driver, or ""); gpus
      (number of GPUs that the driver lists); visible (CUDA_VISIBLE_DEVICES, or null);
      error (reason of a failure, or "").
    """
    # Use little memory: a run may be training here.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    began_s = time.monotonic()
    found: dict[str, Any] = {"platform": "", "kinds": [], "error": ""}
    try:
        import jax
        import jax.numpy as jnp

        for device in jax.local_devices():
            found["platform"] = device.platform
            found["kinds"].append(device.device_kind)
            ones = jax.device_put(jnp.ones((64, 64)), device)
            got = float(jax.jit(lambda x: (x @ x).sum())(ones))
            if got != 64**3:
                found["error"] = (
                    f"{device}: a 64 x 64 matrix of ones times itself sums to {got:g}, "
                    f"not {64**3}"
                )
    except Exception as error:  # any error is reported as a fact
        found["error"] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        found["driver"] = (_NVIDIA / "version").read_text().splitlines()[0]
    gpus = _NVIDIA / "gpus"
    found["gpus"] = len([*gpus.iterdir()]) if gpus.is_dir() else 0
    found["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    found["seconds"] = time.monotonic() - began_s
    return {"driver": "", "plugins": _plugins(), **found}


def host_name() -> dict[str, Any]:
    """Return this host's name and addresses, and whether the name leads to this host.

    Returns:
      name; addresses (to which the name resolves); error (why the name has no address,
      or why a connection to this host by its name fails, or "").
    """
    name = socket.gethostname()
    found: dict[str, Any] = {"name": name, "addresses": [], "error": ""}
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return found | {"error": f"{name} has no address: {error}"}
    found["addresses"] = sorted({str(answer[4][0]) for answer in answers})
    has_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    with socket.create_server(
        ("", 0), family=family, dualstack_ipv6=has_ipv6
    ) as server:
        port = server.getsockname()[1]
        try:
            socket.create_connection((name, port), _CONNECT_S).close()
        except OSError as error:
            found["error"] = f"a connection to {name}:{port} does not arrive: {error}"
    return found


def ports(*words: str) -> dict[str, Any]:
    """Return the ports on which this host cannot listen: {"taken": {port: why}}."""
    taken = {}
    for word in words:
        try:
            socket.create_server(("", int(word))).close()
        except OSError as error:
            taken[word] = error.strerror or str(error)
    return {"taken": taken}


def connect(*addresses: str) -> dict[str, Any]:
    """Return the addresses host:port that do not answer: {"silent": {address: why}}."""
    silent = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError as error:
            silent[address] = str(error)
    return {"silent": silent}


def folder(path: str) -> dict[str, Any]:
    """Try a run's file operations in a folder, and leave nothing behind.

    A folder that does not exist yet is tested in its nearest existing parent.

    Returns:
      path; tried (the nearest existing folder); type (of the file system); free_bytes;
      free_files (-1 if unlimited); seconds (the time that it took); error (reason of a
      failure, or "").
    """
    wanted = Path(path).expanduser().absolute()
    tried, began_s = wanted, time.monotonic()
    found: dict[str, Any] = {"path": str(wanted), "error": ""}
    try:
        # An unreadable folder or a stale mount is an error, not an absent folder.
        tried = next(one for one in (wanted, *wanted.parents) if one.exists())
        used = shutil.disk_usage(tried)
        files = os.statvfs(tried)
        _use(tried)
        found |= {"free_bytes": used.free}
        found |= {"free_files": files.f_favail if files.f_files else -1}
    except OSError as error:
        found["error"] = f"{error.strerror or error}: {error.filename or tried}"
    except RuntimeError as error:
        found["error"] = str(error)
    found["tried"] = str(tried)
    found["type"] = _file_system(tried, Path("/proc/self/mounts").read_text())
    return {"free_bytes": 0, "free_files": 0, **found} | {
        "seconds": time.monotonic() - began_s
    }


def _use(tried: Path) -> None:
    """Use files as saves and caches do: write, sync, rename, read, create, lock.

    Raises:
      OSError: an operation failed.
      RuntimeError: an operation reported success but had no effect.
    """
    data = os.urandom(_NUM_BYTES)
    with tempfile.TemporaryDirectory(prefix=".mjax-doctor-", dir=tried) as name:
        before, after = Path(name, "before"), Path(name, "after")
        with before.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        after.write_bytes(b"old")
        before.replace(after)
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if after.read_bytes() != data:
            raise RuntimeError(
                f"{tried}: a file does not contain the data written to it"
            )
        with contextlib.suppress(FileExistsError):
            after.open("x").close()
            raise RuntimeError(f"{tried}: a file that exists can be created again")
        with after.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.listdir(name) != [after.name]:
            raise RuntimeError(f"{tried}: a folder does not list its files")


def _file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds a path (proc_pid_mounts(5))."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        _, place, this, *_ = line.split()
        place = place.encode().decode("unicode_escape")
        if path.resolve().is_relative_to(place) and len(place) >= best:
            best, kind = len(place), this
    return kind


KINDS: Mapping[str, Callable[..., Mapping[str, Any]]] = MappingProxyType(
    {
        "connect": connect,
        "devices": devices,
        "folder": folder,
        "host_name": host_name,
        "packages": packages,
        "ports": ports,
    }
)


def main(words: Sequence[str]) -> int:
    """Print the facts of a kind; return the exit code."""
    kind, *more = words
    # A library may print to stdout while it loads.
    with contextlib.redirect_stdout(sys.stderr):
        found = KINDS[kind](*more)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
