"""Lightweight clients are separate from each other, like processes."""

import collections

from jax._src.distributed import global_state

from mjax.processes import distributed
from mjax.processes.timed_clients import _agreements, _own_address


def test_each_client_has_an_address_of_its_own():
    """With one address they would share a connection; .0 and .255 are no hosts."""
    found = [_own_address("127.0.0.1:4321", number) for number in range(4_096)]
    assert len({*found}) == len(found)
    parts = [address.removesuffix(":4321").split(".") for address in found]
    assert {tuple(part[:2]) for part in parts} == {("127", "1")}
    assert {int(part[3]) for part in parts} == {*range(1, 251)}


def test_agreements_are_those_of_different_ranks(coordinator):
    clients = [coordinator, coordinator, coordinator]
    before = distributed.rank(), distributed.num_processes(), distributed.client()
    agreements = _agreements(clients)
    assert [a.rank for a in agreements] == [0, 1, 2]
    assert {a.num for a in agreements} == {3}
    # All take part in one agreement: what one posts, the others read.
    assert collections.Counter(a._store._prefix for a in agreements) == {
        "mjax/agreement/start/0/": 3
    }
    assert agreements[0].from_rank(0, "text") == "text"
    assert [a.from_rank(0, "") for a in agreements[1:]] == ["text", "text"]
    after = distributed.rank(), distributed.num_processes(), distributed.client()
    assert before == after
    assert before[2] is global_state.client


def test_an_agreement_of_this_process_is_not_counted(coordinator):
    from mjax.processes.agreement import _opened

    before = _opened["start"]
    _agreements([coordinator])
    assert _opened["start"] == before
