"""Flags of the trainer that change while it runs."""

from mjax.launch.trainer_flags import TrainerFlags


def test_an_update_is_taken_back_until_it_is_kept():
    flags = TrainerFlags(["--seed", "1", "--steps", "9"])
    assert not flags.take_back()
    flags.update(["--seed", "2"], 4)
    flags.keep(4)  # a late report of the previous generation
    again = TrainerFlags([])
    again.take_up(flags.to_json())
    assert again.words == ["--steps", "9", "--seed", "2"]
    assert again.take_back()
    assert again.words == ["--seed", "1", "--steps", "9"]
    assert not again.take_back()
    flags.keep(5)
    assert not flags.take_back()
    assert flags.words == ["--steps", "9", "--seed", "2"]
