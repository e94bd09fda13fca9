"""The compiled step of a run, cached on this host for the next start.

Input: everything that determines the step. Output: a file in the user's cache folder.
The next start of the same step loads it in a fraction of the time of tracing, lowering
and compiling. The file name is a hash of everything that determines the step: config,
mesh, code and versions, XLA options, devices, processor and process number. A step that
does not load is compiled.

jax's own compilation cache saves neither tracing nor lowering, which on a CPU take as
long as compiling. An executable that jax loads from it cannot be serialized again
(`NOT_FOUND: Function ... not found` at the next load), so jax's cache is off for a step
that this module caches.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from mjax.config.train import TrainConfig
from mjax.estimate import memory
from mjax.processes import distributed
from mjax.processes.agreement import Agreement
from mjax.processes.comparison import check_same
from mjax.run import report
from mjax.step.program import Program
from mjax.step.traced import ingredients_of

_LOWERED = "the lowered step"
_SAME_STEP = (
    "The programs differ although flags, code and versions are the same, so the "
    "processes would wait for each other for ever. Compare what else they import and "
    "the jax options in their environment"
)
_SHOWN_DIGITS = 12
_CHECKSUM_BYTES = 32
_MAX_FILES = 64
"""Maximum number of files per host; the oldest are deleted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Contents of a cache file."""

    memory: memory.Estimate
    """Memory of one device, estimated when the step was traced."""
    lowered: str
    """Hash of the lowered program that was compiled."""
    payload: bytes
    """The serialized executable."""
    metrics: tuple[str, ...]
    """Names of the step's metrics, in the order of jax's pytrees."""


class Executables:
    """The cache file of one step in one process, and its contents."""

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        facts: Mapping[str, Any],
        agreement: Agreement,
    ) -> None:
        """Read the file of the step; use it only if every process has one.

        Args:
          config: config of the run with its final vocabulary.
          mesh: mesh of all processes.
          facts: values that describe code and environment, see `processes.comparison`.
          agreement: agreement of all processes; compilation may involve all of them.
        """
        self._agreement = agreement
        self._path: Path | None = None
        if config.keep_compiled and _is_wanted():
            folder = Path(jax.config.jax_compilation_cache_dir).with_name("steps")
            self._path = folder / name_of(config, mesh, facts)
        kept = self._read()
        is_found = agreement.merge("found" * (kept is not None), _if_all)
        self.kept = kept if is_found else None
        """Contents of the file, until the step is loaded; None if some process has no
        file."""

    def load(self, program: Program) -> jax.stages.Compiled | None:
        """Return the cached step, ready to run; None if any process cannot load it.

        Raises:
          ValueError: other processes have loaded another step.
        """
        # The contents are as large as the program on the GPU, so they are not kept.
        kept, self.kept = self.kept, None
        assert kept is not None
        check_same(self._agreement, {_LOWERED: kept.lowered}, _SAME_STEP)
        loaded, problem = None, ""
        metrics = dict.fromkeys(kept.metrics, 0)
        try:
            loaded = serialize_executable.deserialize_and_load(
                kept.payload,
                jax.tree.structure((program.abstract_args, {})),
                jax.tree.structure((program.abstract_state, metrics)),
            )
        except Exception as error:  # any failure: the step can still be compiled
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        problem = self._agreement.merge(problem, _first)
        if not problem:
            return loaded
        report.say(
            f"warning: the cached step does not load and is compiled again ({problem})"
        )
        return None

    def compile(
        self, step: jax.stages.Traced, needed: memory.Estimate
    ) -> jax.stages.Compiled:
        """Compile the step and cache it; a failed write is a warning.

        Args:
          step: the traced step.
          needed: memory of one device.
        Raises:
          ValueError: other processes have lowered another step.
        """
        lowered = self._agreement.together(step.lower)
        digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:_SHOWN_DIGITS]
        check_same(self._agreement, {_LOWERED: digest}, _SAME_STEP)
        # All processes wait here until the last has compiled: gloo aborts a process
        # that waits 30 s for the others in its first collective.
        return self._agreement.together(lambda: self._compile(lowered, digest, needed))

    def _compile(
        self, lowered: jax.stages.Lowered, digest: str, needed: memory.Estimate
    ) -> jax.stages.Compiled:
        if self._path is None:
            return lowered.compile()
        with _without_cache():
            compiled = lowered.compile()
        try:
            payload, _, out_tree = serialize_executable.serialize(compiled)
        except Exception as error:  # any failure: the step can still run
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            report.say(f"warning: the compiled step cannot be cached ({reason})")
            return compiled
        _, metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        kept = Kept(
            memory=needed, lowered=digest, payload=payload, metrics=tuple(metrics)
        )
        body = pickle.dumps(kept)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
            new.write_bytes(hashlib.sha256(body).digest() + body)
            new.replace(self._path)
            files = sorted(self._path.parent.iterdir(), key=lambda p: p.stat().st_mtime)
            for path in files[:-_MAX_FILES]:
                path.unlink()
        return compiled

    def _read(self) -> Kept | None:
        """Return the contents of the file; None if it is absent or damaged."""
        if self._path is None:
            return None
        try:
            content = self._path.read_bytes()
            os.utime(self._path)
        except OSError:
            return None
        checksum, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if hashlib.sha256(body).digest() != checksum:
            return None
        return pickle.loads(body)


def _is_wanted() -> bool:
    """Return whether jax's cache is enabled and XLA dumps no compilation."""
    is_dumped = "--xla_dump_" in os.environ.get("XLA_FLAGS", "")
    cache_dir = jax.config.jax_compilation_cache_dir
    return bool(cache_dir) and jax.config.jax_enable_compilation_cache and not is_dumped


def name_of(config: TrainConfig, mesh: Mesh, facts: Mapping[str, Any]) -> str:
    """Return a hash of everything that determines the step.

    This includes the hosts of the processes, which determine the order of devices in
    the mesh.
    """
    ingredients = {
        **ingredients_of(config, mesh),
        "facts": dict(facts),
        "mesh_shape": dict(mesh.shape),
        "devices": [
            (device.id, device.process_index, device.device_kind)
            for device in mesh.devices.flat
        ],
        "processor": _processor(),
        "process": [distributed.rank(), distributed.num_processes()],
    }
    text = json.dumps(ingredients, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()


def _if_all(texts: Sequence[str]) -> str:
    return texts[0] if all(texts) else ""


def _first(texts: Sequence[str]) -> str:
    return next((text for text in texts if text), "")


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compile without jax's compilation cache."""
    from jax._src import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _processor() -> str:
    """Return the properties of the processor that CPU machine code depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), "")
