"""What a step says about itself: checksums, seals, completeness."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from mjax.ckpt import manifest
from mjax.ckpt.manifest import DamagedError, Leaf, Manifest, Piece


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_checksum_is_the_one_of_rfc_3720(data, expected):
    """Appendix B.4, whose bytes are in the order they are sent."""
    assert manifest.crc32c(np.frombuffer(data, np.uint8)) == expected


def test_an_array_of_any_kind_is_summed_in_c_order(monkeypatch):
    values = np.arange(24.0).reshape(4, 6)
    expected = manifest.crc32c(np.frombuffer(values.tobytes(), np.uint8))
    assert manifest.crc32c(values) == expected
    assert manifest.crc32c(np.asfortranarray(values)) == expected
    assert manifest.crc32c(values[::2]) == manifest.crc32c(values[::2].copy())
    half = values.astype(ml_dtypes.bfloat16)
    assert manifest.crc32c(half) == manifest.crc32c(half.view(np.uint16))
    assert manifest.crc32c(np.array(3.0)) == manifest.crc32c(np.array([3.0]))
    assert manifest.crc32c(np.zeros((0, 4))) == 0
    monkeypatch.setattr(manifest, "_SUM_BYTES", 7)  # part by part
    assert manifest.crc32c(values) == expected


def example():
    return Manifest(
        step=3,
        save_id="a1",
        leaves={
            "w": Leaf(shape=(2, 3), dtype="bfloat16"),
            "n": Leaf(shape=(), dtype="int32"),
        },
        part_sums=[1, 2],
        run={"config": {"seed": 1}, "note": "tschüß"},
    )


def test_a_manifest_comes_back():
    assert manifest.read_manifest(manifest.write_manifest(example()), "x") == example()
    assert example().num_bytes == 2 * 3 * 2 + 4
    pieces = {"w": [Piece(((0, 1), (0, 3)), 5)], "n": [Piece((), 6)]}
    assert manifest.read_pieces(manifest.write_pieces(pieces), "x") == pieces


def test_every_flipped_bit_of_a_manifest_is_noticed():
    text = manifest.write_manifest(example())
    for at, bit in itertools.product(range(len(text) - 1), range(7)):
        flipped = text[:at] + chr(ord(text[at]) ^ 1 << bit) + text[at + 1 :]
        with pytest.raises(DamagedError):
            manifest.read_manifest(flipped, "x")
    for end in range(len(text) - 1):  # the end of the last line is of no use
        with pytest.raises(DamagedError):
            manifest.read_manifest(text[:end], "x")


@pytest.mark.parametrize("text", ["", "{}", "[]\n{}", '{"format": 1}\n{}', "\x00" * 9])
def test_what_is_no_manifest_is_damage(text):
    with pytest.raises(DamagedError, match="7/f does not begin with its checksum"):
        manifest.unseal(text, "7/f")


def test_a_newer_format_is_refused_with_both_versions(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "VERSION", 2)
        text = manifest.seal({"a": 1})
    with pytest.raises(ValueError, match=r"x has format 2, .* reads up to 1; install"):
        manifest.unseal(text, "x")


def test_missing_pieces_are_named():
    leaves = example().leaves
    pieces = {"w": [Piece(((0, 1), (0, 3)), 5)], "n": [Piece((), 6)]}
    with pytest.raises(DamagedError, match="3: w has 3 of 6 elements"):
        manifest.check_complete(leaves, pieces, "3")
    with pytest.raises(DamagedError, match="3: n has 0 of 1 elements"):
        manifest.check_complete({"n": leaves["n"]}, {}, "3")
    pieces["w"].append(Piece(((1, 2), (0, 3)), 5))
    manifest.check_complete(leaves, pieces, "3")
