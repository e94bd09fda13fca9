"""Damaged steps: every file of one, in every way, is noticed or does no harm."""

from functools import partial

import pytest

from mjax.ckpt import manifest
from mjax.ckpt.manifest import DamagedError
from scripts.faults.checkpoint_damage import (
    FLIPPED,
    HARMLESS,
    NEW,
    NOTICED,
    WHOLE_FILE,
    Case,
    cases,
    flip,
    kind,
    outcome,
    save_two_steps,
    verify_outcome,
)

# Orbax alone reads these; the arrays are found by the merged index.
UNREAD = {"state/_METADATA", "state/ocdbt.process_<i>/manifest.ocdbt"}
READ = {
    *("checkpoint.json", "pieces.<i>.json", "state/manifest.ocdbt", "state/d/*"),
    "state/ocdbt.process_<i>/d/*",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    work_dir = tmp_path_factory.mktemp("damage") / "run"
    save_two_steps(work_dir)
    return work_dir


def test_the_files_of_a_step_are_those_that_are_damaged_here(saved):
    step_dir = saved / "checkpoints" / str(NEW)
    found = {kind(case.file) for case in cases(step_dir, num_bits=0, seed=0)}
    assert found == UNREAD | READ


@pytest.mark.parametrize("file", sorted(UNREAD | READ))
def test_a_damaged_step_is_passed_over_with_its_reason_or_is_still_right(saved, file):
    step_dir = saved / "checkpoints" / str(NEW)
    noticed = set()
    for case in cases(step_dir, num_bits=1, seed=0):
        if kind(case.file) != file:
            continue
        verdict, message = outcome(saved, case)
        assert verdict in (NOTICED, HARMLESS), f"{case.damage}: {message}"
        if verdict == NOTICED:
            noticed.add(case.damage)
            assert message.startswith(f"{NEW}/"), message
    # Half of a data file may be an index that nobody reads after the parts are merged.
    assert file in UNREAD or noticed >= WHOLE_FILE.keys() - {"half"}


# Orbax reads leaves that it did not write: it would like to know their shardings.
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("file", sorted(UNREAD | READ))
def test_what_verify_does_not_notice_orbax_restores_bitwise(saved, file):
    step_dir = saved / "checkpoints" / str(NEW)
    verdicts = {}
    for case in cases(step_dir, num_bits=12, seed=1):
        if kind(case.file) != file:
            continue
        verdict, message = verify_outcome(saved, case)
        assert verdict in (NOTICED, HARMLESS), f"{case.damage}: {message}"
        verdicts.setdefault(case.damage, set()).add(verdict)
    if file == "state/_METADATA":  # which mjax needs for nothing else
        assert {verdicts[damage] == {NOTICED} for damage in WHOLE_FILE} == {True}
        assert NOTICED in verdicts[FLIPPED]


# An array that says to be larger reads right where it was written: Orbax reads beyond.
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("shape", ['"shape":[16,8]', '"shape":[6]'])
def test_no_bit_of_the_shape_of_an_array_can_change_without_notice(saved, shape):
    step_dir = saved / "checkpoints" / str(NEW)
    files = [*(step_dir / "state").rglob("d/*")]
    [path] = [path for path in files if shape.encode() in path.read_bytes()]
    first = path.read_bytes().index(shape.encode())
    for bit in range(8 * first, 8 * (first + len(shape))):
        case = Case(str(path.relative_to(step_dir)), FLIPPED, partial(flip, bit=bit))
        verdict, message = verify_outcome(saved, case)
        assert verdict == NOTICED, f"bit {bit - 8 * first}: {message}"


def test_no_bit_of_a_sealed_text_can_change_without_notice():
    """Not even one of the version: a newer mjax is not to blame for it."""
    text = manifest.seal({"a": [1, 2]})
    data = text.encode()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            got = manifest.unseal(changed.decode(), "the file")
        except (DamagedError, UnicodeDecodeError):
            continue
        assert got == {"a": [1, 2]}


def test_a_newer_format_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(manifest, "VERSION", 7)
    text = manifest.seal({})
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has format 7, this version .* up to 1;"):
        manifest.unseal(text, "the file")
