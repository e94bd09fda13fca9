"""Interfaces that share a subnet are found, whatever the sizes of their subnets."""

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from mjax.health.checks.routes import Address, sharing


def address(interface: str, number: int, length: int) -> Address:
    network = ipaddress.ip_interface((0x0A000000 + number, length))
    return Address(interface=interface, network=network, has_failed=False)


ADDRESSES = st.lists(
    st.builds(
        address, st.sampled_from("abc"), st.integers(0, 2**12), st.integers(20, 32)
    ),
    max_size=8,
)


@given(ADDRESSES)
def test_addresses_share_a_subnet_if_any_two_of_them_overlap(found):
    """Compare with each pair: what was written first, and is slow for many."""
    networks = [each.network.network for each in found]
    wanted = [
        one
        for one, mine in zip(found, networks, strict=True)
        if mine.prefixlen < 32
        and any(
            one.interface != other.interface
            and theirs.prefixlen < 32
            and mine.overlaps(theirs)
            for other, theirs in zip(found, networks, strict=True)
        )
    ]
    assert sharing(found) == wanted


def test_one_large_subnet_shares_with_thousands_of_small_ones():
    found = [address(f"i{n}", n * 2**8, 24) for n in range(2_000)]
    assert sharing(found) == []
    assert len(sharing([*found, address("j", 0, 8)])) == 2_001


def test_addresses_of_ipv6_are_left_out():
    six = [
        Address(
            interface=name,
            network=ipaddress.ip_interface("fd00::1/64"),
            has_failed=False,
        )
        for name in "ab"
    ]
    assert sharing(six) == []
