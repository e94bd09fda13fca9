"""Check the folders that a run writes to: work dir, caches, temporary files."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mjax.doctor.facts import Facts, check, probe
from mjax.health.check import Check
from mjax.health.findings import Verdict, failed, ok

_OF_ONE_HOST = ("btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs")
"""Types of file systems that are visible only on one host unless exported."""
_LEAST_FILES = 10_000
"""Minimum number of files that can still be created. One save of a thousand hosts
creates this many."""


def usable(facts: Facts, *, least_gb: int | float) -> Verdict:
    """Check that the folder has space, and that a run's file operations work."""
    place = f"{facts['path']} ({facts['type']})"
    if facts["error"]:
        return failed(f"{place}: {facts['error']}")
    free_gb, limit = facts["free_bytes"] / 1e9, f"at least {least_gb:g} GB free"
    value = f"{place}: {free_gb:.1f} GB free, tried in {facts['seconds']:.2f} s"
    if free_gb < least_gb:
        return failed(f"{place} has {free_gb:.1f} GB free", value, limit)
    if 0 <= facts["free_files"] < _LEAST_FILES:
        return failed(f"{place} can hold {facts['free_files']} more files", value)
    return ok(value, limit)


def shared(facts: Facts) -> Verdict:
    """Check that all hosts of the run see the folder."""
    place = f"{facts['path']} ({facts['type']})"
    if facts["type"] in _OF_ONE_HOST:
        return failed(f"{place} is on a file system that only this host sees")
    return ok(place)


def cache_folder() -> Path:
    """Return the cache folder for programs and tokens (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mjax"


def checks(work_dir: str, hosts: int, least_gb: int | float) -> Sequence[Check]:
    """Return the checks of a run's folders.

    Args:
      work_dir: work dir of the future run.
      hosts: number of hosts; with more than one, the file system must be shared.
      least_gb: required free space in the work dir, in GB.
    """
    places = {
        "work_dir": (work_dir, least_gb, "--work-dir"),
        "cache": (str(cache_folder()), 1.0, "XDG_CACHE_HOME"),
        "temporary": (tempfile.gettempdir(), 1.0, "TMPDIR"),
    }
    found = [
        check(
            f"folders.{name}",
            f"A run can use the folder that {flag} names.",
            probe("folder", path),
            lambda facts, least_gb=least: usable(facts, least_gb=least_gb),
            f"free or mount it, or name another folder with {flag}",
        )
        for name, (path, least, flag) in places.items()
    ]
    if hosts > 1:
        found.append(
            check(
                "folders.shared",
                "The work dir is on a file system that other hosts can see.",
                probe("folder", work_dir),
                shared,
                "give a --work-dir on a network file system that all hosts mount",
            )
        )
    return found
