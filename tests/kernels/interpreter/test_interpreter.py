"""What the tests of kernels rely on, a small kernel each, and the process they run in.

A release of jax that changes the interpreter fails here first.
"""

import importlib
import inspect
import os
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.interpreter import contract, probes
from tests.kernels.interpreter.runner import CaseError, Pool, Runner
from tests.kernels.interpreter.source_change import changed, source

THIS = "tests.kernels.interpreter.test_interpreter"
PROBES = "tests.kernels.interpreter.probes"
# Sums of 128 products of order 1, in another order and scaled: float32 roundings of
# partial sums of order 10.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


@pytest.mark.parametrize("name", [probe.__name__ for probe in probes.RIGHT])
def test_a_right_kernel_computes_the_product(runner: Runner, name: str) -> None:
    assert runner.run(f"{PROBES}:run", name=name) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "message"),
    [(probe.__name__, message) for probe, message in probes.WRONG.items()],
)
def test_a_wrong_kernel_is_refused(runner: Runner, name: str, message: str) -> None:
    with pytest.raises(CaseError, match=message) as caught:
        runner.run(f"{PROBES}:run", name=name)
    assert caught.value.how == "kernel"


def test_a_kernel_is_compiled_once_for_all_warpgroups_and_blocks(runner: Runner):
    assert runner.run(f"{PROBES}:num_compilations", name="many_blocks") == 1


def test_a_change_in_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.check()
    name = next(name for name in contract.FUNCTIONS if name.endswith(":wgmma"))
    expected = contract.FUNCTIONS[name]
    monkeypatch.setitem(contract.FUNCTIONS, name, "token a b")
    monkeypatch.setitem(contract.FUNCTIONS, "jax._src.callback:gone", "")
    monkeypatch.setattr(contract, "VALUES", ("jax._src.no_module:thing",))
    message = (
        rf"jax [\d.]+ differs from jax .*{name} takes \({expected}\), not \(token a b\)"
        r"; jax._src.callback:gone is missing; jax._src.no_module:thing is missing"
    )
    with pytest.raises(RuntimeError, match=message):
        contract.check()


def test_a_wait_that_has_ended_is_no_part_of_a_deadlock() -> None:
    from tests.kernels.interpreter.deadlock import Cluster

    shared: Any = SimpleNamespace(
        num_blocks_per_cluster=1, num_pallas_threads_per_block=2
    )
    first, second = (
        SimpleNamespace(phase=3, last_observed_phase_by_thread={thread: 3})
        for thread in ("a", "b")
    )
    cluster: Any = Cluster(shared)
    cluster.enter("a", first, "line 1")
    # The wait of a is over, but it has not come to `leave`.
    first.phase = first.last_observed_phase_by_thread["a"] = 4
    cluster.enter("b", second, "line 2")
    cluster.leave("a")
    with pytest.raises(RuntimeError, match=r"deadlock: .* b at line 2, a at line 3"):
        cluster.enter("a", first, "line 3")


# ---------------------------------------------------- the worker, called by name below


def add(a: int, b: int) -> int:
    return a + b


def fail() -> None:
    print("printed on the way")
    raise LookupError("reason")


def hang() -> None:
    time.sleep(10_000)


def die() -> None:
    os._exit(7)


def pid() -> int:
    return os.getpid()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_hung_case_is_killed_and_the_next_one_runs(runner: Runner) -> None:
    process = runner.run(f"{THIS}:pid")
    with pytest.raises(CaseError, match=r"killed after 0\.5 s") as caught:
        runner.run(f"{THIS}:hang", timeout_s=0.5)
    assert caught.value.how == "hung"
    assert not is_running(process)
    assert runner.run(f"{THIS}:add", a=2, b=3) == 5


def test_a_case_that_ends_the_process_fails_and_the_next_one_runs(runner: Runner):
    with pytest.raises(CaseError, match="ended with code 7") as caught:
        runner.run(f"{THIS}:die")
    assert caught.value.how == "died"
    assert runner.run(f"{THIS}:add", a=2, b=3) == 5


def test_an_exception_comes_back_with_what_was_printed(runner: Runner) -> None:
    message = r"(?s)LookupError: reason.*printed on the way"
    with pytest.raises(CaseError, match=message) as caught:
        runner.run(f"{THIS}:fail")
    assert caught.value.how == "raised"


def test_a_worker_whose_tests_are_gone_ends(runner: Runner) -> None:
    with Runner() as orphan:
        process = orphan.run(f"{THIS}:pid")
        assert orphan._process
        assert orphan._process.stdin
        orphan._process.stdin.close()
        assert orphan._process.wait(timeout=60) == 0
    assert not is_running(process)


def test_a_pool_that_is_closed_leaves_no_process() -> None:
    with Pool(workers=1) as pool:
        process = pool.submit(f"{THIS}:pid").result()
        running = pool.submit(f"{THIS}:hang")
        waiting = pool.submit(f"{THIS}:add", a=2, b=3)
        while not running.running():
            time.sleep(0.01)
    assert waiting.cancelled()
    assert isinstance(running.exception(), CaseError)
    assert not is_running(process)


def tuned_blocks() -> list[int]:
    """Import a module with a change, then as it is."""
    module = "mjax.kernels.attention.tuning"
    # White space does not count.
    edits = [
        (
            "BLOCKED_CPU =\nBlockedTuning(block=64)",
            "BLOCKED_CPU = BlockedTuning(block=32)",
        )
    ]
    blocks = []
    for context in (changed(module, edits), nullcontext()):
        with context:
            tuning = importlib.import_module(module)
            blocks.append(tuning.BLOCKED_CPU.block)
    return blocks


def test_a_change_of_the_source_is_seen_inside_the_context_only(runner: Runner):
    assert runner.run(f"{THIS}:tuned_blocks") == [32, 64]


@pytest.mark.parametrize("text", ["no such text", "block"])
def test_a_text_that_is_not_there_once_is_refused(text: str) -> None:
    module = "mjax.kernels.attention.tuning"
    times = source(module).count(text)
    with (
        pytest.raises(ValueError, match=re.escape(f"occurs {times} times: '{text}'")),
        changed(module, [(text, "")]),
    ):
        pass


def test_every_function_that_is_replaced_is_in_the_contract() -> None:
    from tests.kernels.interpreter import completion

    replaced = re.findall(
        r"^    (\w+)\.([\w.]+) = ", inspect.getsource(completion.install), re.MULTILINE
    )
    names = {name.partition(":")[2] for name in contract.FUNCTIONS}
    assert len(replaced) >= 8
    assert {path for _, path in replaced} <= names
