"""Check the software: packages, jax on its devices, CUDA.

Minimum drivers: NVIDIA, CUDA Toolkit release notes, table "CUDA Toolkit and minimum
required driver version for CUDA minor version compatibility",
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mjax.doctor.facts import Facts, check, probe
from mjax.health.check import Check
from mjax.health.findings import Verdict, failed, judge_each, ok, unknown

_PACKAGES = probe("packages")
_DEVICES = probe("devices")
_LEAST_DRIVER: Mapping[str, str] = MappingProxyType({"12": "525", "13": "580"})
"""Minimum driver branch for each major version of CUDA (source above)."""
_DRIVER = re.compile(r"\b(\d{3}(?:\.\d+){1,2})\b")
_NO_GPU = "no NVIDIA driver is loaded on this host"


def python(facts: Facts) -> Verdict:
    """Check that the interpreter is new enough."""
    have, wanted = facts["python"], facts["requires_python"]
    if not SpecifierSet(wanted).contains(have, prereleases=True):
        return failed(f"Python is {have}, mjax needs {wanted}", have, wanted)
    return ok(have, wanted)


def _problem(requirement: str, version: str | None) -> str:
    if version is None:
        return "is not installed"
    if not Requirement(requirement).specifier.contains(version, prereleases=True):
        return f"is {version}"
    return ""


def packages(facts: Facts) -> Verdict:
    """Check that all required packages are installed in suitable versions."""
    pairs = facts["required"]
    problems = [(wanted, _problem(wanted, have)) for wanted, have in pairs]
    return judge_each(
        [(wanted, problem) for wanted, problem in problems if problem],
        f"{len(pairs)} packages",
    )


def extras(facts: Facts) -> Verdict:
    """Check that the installed packages of extras have suitable versions.

    A package of an extra that is not installed is not a problem.
    """
    whole, problems = [], []
    for name, pairs in facts["extras"].items():
        found = [(wanted, have, _problem(wanted, have)) for wanted, have in pairs]
        if not any(problem for *_, problem in found):
            whole.append(name)
        problems += [
            (f"{wanted} of mjax[{name}]", problem)
            for wanted, have, problem in found
            if problem and have is not None
        ]
    return judge_each(problems, f"whole: {', '.join(whole) or 'none'}")


def jax_computes(facts: Facts) -> Verdict:
    """Check that jax starts and computes correctly on each device."""
    if facts["error"]:
        return failed(facts["error"])
    kinds = facts["kinds"]
    names = sorted({*kinds})
    counts = ", ".join(f"{kinds.count(name)} x {name}" for name in names)
    return ok(f"{counts}, in {facts['seconds']:.1f} s")


def jax_sees_gpus(facts: Facts) -> Verdict:
    """Check that jax uses all GPUs of the host."""
    gpus = facts["gpus"]
    if not gpus:
        return unknown(_NO_GPU)
    if facts["error"]:
        return unknown(f"jax did not start: {facts['error']}")
    if facts["platform"] != "gpu":
        return failed(f"the driver has {gpus} GPUs, jax uses {facts['platform']}")
    used, visible = len(facts["kinds"]), facts["visible"]
    if used < gpus and visible is not None:
        return unknown(
            f"jax uses {used} of {gpus} GPUs, CUDA_VISIBLE_DEVICES is {visible}"
        )
    if used < gpus:
        return failed(f"the driver has {gpus} GPUs, jax uses {used} of them")
    return ok(f"{used} of {gpus} GPUs")


def plugin(facts: Facts) -> Verdict:
    """Check that jax has exactly one CUDA plugin, of jaxlib's version."""
    plugins, jaxlib = facts["plugins"], facts["jaxlib"]
    if not plugins:
        return unknown("no CUDA plugin of jax is installed")
    shown = ", ".join(f"{name} {version}" for name, version in plugins.items())
    if len(plugins) > 1:
        return failed(f"{shown}: two plugins register the same devices")
    return judge_each(
        [
            (name, f"is {version}, jaxlib is {jaxlib}")
            for name, version in plugins.items()
            if version != jaxlib
        ],
        shown,
        f"jaxlib {jaxlib}",
    )


def driver(facts: Facts) -> Verdict:
    """Check the driver against the CUDA version of jax's plugins, if there are any."""
    if not facts["driver"]:
        return unknown(_NO_GPU)
    found = _DRIVER.search(facts["driver"])
    if found is None:
        return unknown(f"no version in {facts['driver']!r}")
    for name in facts["plugins"]:
        major = name.removeprefix("jax-cuda").removesuffix("-plugin")
        least = _LEAST_DRIVER[major]
        if Version(found[1]) < Version(least):
            reason = f"the driver is {found[1]}, CUDA {major} needs {least} or newer"
            return failed(reason, found[1], least)
    return ok(found[1])


CHECKS: tuple[Check, ...] = (
    check(
        "software.python",
        "The interpreter is new enough.",
        _PACKAGES,
        python,
        "make an environment with a newer Python: make env PYTHON=/path/to/python3.12",
    ),
    check(
        "software.packages",
        "The packages that mjax requires are installed, in suitable versions.",
        _PACKAGES,
        packages,
        "install again: pip install -c constraints.txt -e .",
    ),
    check(
        "software.extras",
        "The installed packages of extras have suitable versions.",
        _PACKAGES,
        extras,
        "install the extra again: pip install -c constraints.txt -e '.[NAME]'",
    ),
    check(
        "software.jax",
        "jax starts, and each device computes correctly.",
        _DEVICES,
        jax_computes,
        "run python -c 'import jax; print(jax.devices())' and read what it says",
    ),
    check(
        "software.gpus",
        "jax uses all GPUs of the host.",
        _DEVICES,
        jax_sees_gpus,
        "pip install -c constraints.txt -e '.[cuda13]', and unset JAX_PLATFORMS",
    ),
    check(
        "software.plugin",
        "jax has exactly one CUDA plugin, of the same version as jaxlib.",
        _PACKAGES,
        plugin,
        "pip uninstall all plugins of jax, then install mjax[cuda13] or mjax[cuda12]",
    ),
    check(
        "software.driver",
        "The driver is new enough for the CUDA version of jax's plugin.",
        _DEVICES,
        driver,
        "update the driver, or install the plugin of an older CUDA: mjax[cuda12]",
    ),
)
