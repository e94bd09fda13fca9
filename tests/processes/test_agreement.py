"""Agreement: between threads of one process, and between three processes."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mjax.ckpt.manifest import DamagedError
from mjax.processes.agreement import Agreement, name_processes
from mjax.processes.progress import OF_ANOTHER
from tests.processes.test_distributed import LIMIT_S, clean_environment, free_port

LONG = "é\0😀" * 400_000


class OwnError(RuntimeError):
    """A kind that the others know only if it is named."""


def members(num: int, **options: Any) -> list[Agreement]:
    """Return the agreements of processes that are threads here."""
    made = [Agreement("test", (OwnError,), **options) for _ in range(num)]
    for rank, agreement in enumerate(made):
        agreement.rank, agreement.num = rank, num
        agreement._store = made[0]._store
    return made


def ended(
    agreements: list[Agreement], act: Callable[[Agreement], Any]
) -> list[Any | Exception]:
    """Return what each process returned or raised."""
    with ThreadPoolExecutor(len(agreements)) as pool:
        futures = [pool.submit(act, agreement) for agreement in agreements]
        errors = [future.exception(LIMIT_S) for future in futures]
    return [
        error or future.result() for error, future in zip(errors, futures, strict=True)
    ]


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "own", "other"),
    [
        (json.JSONDecodeError("bad", "", 0), json.JSONDecodeError, ValueError),
        (NotImplementedError("bad"), NotImplementedError, NotImplementedError),
        (OwnError("bad"), OwnError, OwnError),
        (DamagedError("bad"), DamagedError, RuntimeError),
        (OSError("bad"), RuntimeError, RuntimeError),
        (KeyError("bad"), KeyError, RuntimeError),
        (ValueError(f"bad{LONG}"), ValueError, ValueError),
    ],
)
def test_what_fails_in_one_process_fails_in_all(error, own, other):
    def act(agreement: Agreement) -> Any:
        is_failing = agreement.rank == 1
        return agreement.together(failing(error) if is_failing else lambda: 1)

    raised = ended(members(3), act)
    assert [type(problem) for problem in raised] == [other, own, other]
    assert str(raised[0]) == str(raised[2])
    assert str(raised[0]).startswith("process 1: ")
    assert "bad" in str(raised[0])
    assert str(error) in str(raised[0])


@pytest.mark.parametrize(
    ("error", "own", "other"),
    [
        (ValueError(f"bad{LONG}"), ValueError, ValueError),
        (OwnError("bad"), OwnError, OwnError),
        (OSError("bad"), RuntimeError, RuntimeError),
        (KeyError("bad"), KeyError, RuntimeError),
    ],
)
def test_what_process_0_decides_is_raised_in_all(error, own, other):
    raised = ended(members(2), lambda a: a.decide(failing(error)))
    assert [type(problem) for problem in raised] == [own, other]
    assert str(error) in str(raised[1])
    notes = [getattr(problem, "__notes__", []) for problem in raised]
    assert notes == [[], [OF_ANOTHER]]


def test_all_get_what_process_0_decides_and_what_each_has_done():
    def act(agreement: Agreement) -> Any:
        rank = agreement.rank
        return (
            agreement.together(lambda: rank),
            agreement.decide(lambda: f"by {rank}"),
            agreement.all_of(f"from {rank}"),
            agreement.from_rank(2, f"of {rank}"),
            agreement.merge(f"{rank}", "+".join),
        )

    same = ("by 0", ["from 0", "from 1", "from 2"], "of 2", "0+1+2")
    assert ended(members(3), act) == [(rank, *same) for rank in range(3)]


def test_a_merge_that_is_refused_is_raised_in_all():
    def merge(texts: Any) -> str:
        raise ValueError(f"no: {texts}")

    raised = ended(members(2), lambda a: a.merge(f"{a.rank}", merge))
    assert [str(error) for error in raised] == ["no: ['0', '1']"] * 2


def test_processes_that_do_not_answer_are_named_and_the_late_ones_learn_of_it():
    agreements = members(5, timeout_s=0)
    says = r"^processes 1, 3-4 did not answer within 0 s \(agreement on: test\)"
    agreements[2]._store.post("0/of/2", "")
    with pytest.raises(RuntimeError, match=says):
        agreements[0].together(lambda: 1)
    with pytest.raises(RuntimeError, match=says):
        agreements[3].together(lambda: 1)


def test_its_own_failure_says_more_than_who_did_not_answer():
    with pytest.raises(ValueError, match="bad") as caught:
        members(2, timeout_s=0)[0].together(failing(ValueError("bad")))
    assert "process 1 did not answer" in str(caught.value.__context__)


def test_a_process_0_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("mjax.processes.agreement._MARGIN_S", 0)
    agreement = members(2, timeout_s=0)[1]
    for agree in (lambda: agreement.decide(str), lambda: agreement.together(str)):
        with pytest.raises(RuntimeError, match=r"^process 0 did not answer within 0 s"):
            agree()


def test_what_all_have_read_is_removed():
    agreements = members(2)

    def act(agreement: Agreement) -> None:
        for _ in range(20):
            agreement.decide(lambda: "text")
            agreement.all_of("text")

    ended(agreements, act)
    store: Any = agreements[0]._store
    left = [key for key in store._client._texts if key.startswith(store._prefix)]
    assert left == [f"{store._prefix}39/answer"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "process 3"),
        ([1, 2, 3, 7], "processes 1-3, 7"),
        ([0, 2], "processes 0, 2"),
    ],
)
def test_processes_are_named_in_blocks(ranks, words):
    assert name_processes(ranks) == words


AGREE = """
import json, os, sys
from mjax.processes.agreement import Agreement
from mjax.processes.config import DistributedConfig
from mjax.processes.distributed import start
from jax._src import xla_bridge
rank = int(sys.argv[2])
start(DistributedConfig(coordinator=sys.argv[1], num_processes=3, process_id=rank))
agreement = Agreement("test", timeout_s=60)
def fail():
    raise ValueError("bad" * 1_000_000)
said = []
for act in (fail, None):
    try:
        agreement.together(act if act and rank == 1 else lambda: None)
        said.append(agreement.all_of(f"of {rank}"))
    except ValueError as error:
        said.append([str(error)[:14], len(str(error))])
assert xla_bridge._backends == {}, "no device is touched"
print(json.dumps(said))
"""


def test_processes_agree_without_devices(tmp_path: Path):
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", AGREE, coordinator, str(rank)],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, outputs
    said = [json.loads(out) for out, _ in outputs]
    texts = ["of 0", "of 1", "of 2"]
    assert said[1] == [["badbadbadbadba", 3_000_000], texts]
    for rank in (0, 2):
        assert said[rank] == [["process 1: bad", 3_000_011], texts]
