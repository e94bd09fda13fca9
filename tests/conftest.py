"""Set up every test session: 8 simulated devices, annotations checked."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

# Tests compile hundreds of small programs and run each a few times: LLVM without its
# optimisation passes halves the time of the suite. XLA also ends the process if eight
# devices on two loaded cores do not all reach a collective within 40 s. The flags must
# be set before jax reads the variable.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import hypothesis
import jax
import pytest
from beartype import BeartypeConf, BeartypeDecorPlace
from beartype.claw import beartype_package
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The shapes and types that the code declares are checked in tests, not in production.
# Functions without declared shapes are checked by beartype alone: with jaxtyping's
# context around each call, the whole suite would take 1.5 times as long.
REPOSITORY = Path(__file__).parents[1]
WITH_SHAPES = tuple(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in (REPOSITORY / "mjax").rglob("*.py")
    if "from jaxtyping import" in path.read_text()
)
beartype_package(
    "mjax",
    conf=BeartypeConf(
        claw_skip_package_names=WITH_SHAPES,
        claw_is_pep526=False,
        claw_decor_place_func=BeartypeDecorPlace.FIRST,
    ),
)
install_import_hook(WITH_SHAPES, "beartype.beartype")

# A slow machine must not fail a test; every session tests the same examples.
hypothesis.settings.register_profile(
    "mjax", deadline=None, max_examples=30, derandomize=True
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile("mjax")

STRICT_FOLDERS = ("kernels", "layers", "model")
"""Below tests/: where no array may change its dtype or its rank by itself.

The marker `promotion` says where one may: Optax, and so a whole step, changes both.
"""


@contextlib.contextmanager
def promotion(
    dtype: Literal["strict", "standard"] = "strict",
    rank: Literal["raise", "allow"] = "raise",
) -> Iterator[None]:
    """Set the promotion rules that the marker requests."""
    with jax.numpy_dtype_promotion(dtype), jax.numpy_rank_promotion(rank):
        yield


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder not in STRICT_FOLDERS:
        yield
        return
    marker = request.node.get_closest_marker("promotion")
    with promotion(**(marker.kwargs if marker else {})):
        yield


@pytest.fixture
def caches(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Keep the compilation cache of the user out of the tests."""
    home = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
