"""Find the CUDA toolkit for jax, which assembles kernels with its ptxas.

Input: an environment and folders. Output: a root with `bin/ptxas` and libdevice.
"""

import glob
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

_PTXAS = Path("bin", "ptxas")
_LIBDEVICE = Path("nvvm", "libdevice", "libdevice.10.bc")
# Where XLA itself looks, after the path from jax.
_DEFAULT = Path("/usr/local/cuda")


def missing_to_jax(env: Mapping[str, str]) -> Path | None:
    """Return a root that jax does not find by itself; None if it finds one.

    jax 0.11.2 takes the CUDA_ROOT of the environment or the wheel nvidia-cuda-nvcc, XLA
    /usr/local/cuda. jax must be told of a toolkit elsewhere that is only on the PATH.

    Args:
      env: environment variables.
    """
    if "CUDA_ROOT" in env or find([*_of_wheels(), _DEFAULT]) is not None:
        return None
    named = [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    return find([*named, *_of_path(env.get("PATH", "")), *_installed()])


def find(roots: Iterable[Path]) -> Path | None:
    """Return the first folder that is a root."""
    for root in roots:
        if (root / _PTXAS).is_file() and (root / _LIBDEVICE).is_file():
            return root
    return None


def describe_ptxas(env: Mapping[str, str]) -> str:
    """Return the ptxas that is expected to run and its release, for the record."""
    named = [Path(env["CUDA_ROOT"])] if env.get("CUDA_ROOT") else []
    root = find([*named, *_of_wheels(), _DEFAULT])
    if root is None:
        return "not found"
    ptxas = root / _PTXAS
    try:
        done = subprocess.run(
            [ptxas, "--version"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{ptxas}: {error}"
    _, _, release = done.stdout.strip().rpartition("release ")
    return f"{ptxas}, {release.splitlines()[0] if release else 'unknown release'}"


def _of_wheels() -> list[Path]:
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ImportError:
        return []
    locations = None if spec is None else spec.submodule_search_locations
    return [Path(path) for path in locations or []]


def _of_path(path: str) -> list[Path]:
    """Return the parents of the folders that have a ptxas or nvcc, links resolved."""
    found = [shutil.which(program, path=path) for program in ("ptxas", "nvcc")]
    return [Path(os.path.realpath(program)).parents[1] for program in found if program]


def _installed() -> list[Path]:
    patterns = ("/usr/local/cuda-*", "/opt/cuda*", "/opt/nvidia/cuda*")
    return [Path(path) for p in patterns for path in sorted(glob.glob(p), reverse=True)]
