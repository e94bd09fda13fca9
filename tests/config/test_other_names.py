"""Names of other trainers lead to flags that exist."""

import re

import pytest

from mjax.cli import flags
from mjax.config.command_line import Command, parse
from mjax.config.other_names import OTHER_NAMES
from mjax.config.train import TrainConfig
from mjax.recipes import RECIPES

KNOWN = {
    name
    for part in (Command, TrainConfig)
    for flag in flags.flags_of(part)
    for name in (flag.name, flag.off_name)
}
OF_LAUNCH = {"--hosts"}


def test_every_flag_that_the_table_names_exists():
    named = {
        flag
        for meaning in OTHER_NAMES.values()
        for flag in re.findall(r"--[a-z][\w.-]*\w", meaning)
    }
    assert named - KNOWN == OF_LAUNCH


def test_names_are_written_as_they_are_looked_up():
    assert [
        n for n in OTHER_NAMES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", n)
    ] == []
    ours = [name for name in OTHER_NAMES if f"--{name}" in KNOWN]
    assert ours == [], "a name that exists here is never looked up"


def test_sentences_are_sentences():
    for name, meaning in OTHER_NAMES.items():
        if meaning not in KNOWN:
            assert " " in meaning, name
            assert not meaning.endswith("."), name


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--learning-rate", "here it is --optim.lr"),
        ("--tensor_model_parallel_size", "here it is --mesh.tp"),
        ("--tensor-parallel-degree", "here it is --mesh.tp"),
        ("--hybrid_shard_degree", "here it is --mesh.dp-shard"),
        ("--sm_activation_offloading", "--model.remat offload"),
        ("--activation_loading_horizon", "here it is --model.offload-horizon"),
        ("--model.width", "here it is --model.d-model"),
        ("--depth", "here it is --model.layers"),
        ("--resume", "--work-dir DIR alone resumes the run in DIR"),
        ("--epochs", "--steps"),
        ("--gpus", "--simulate-devices"),
        ("--bf16", "--precision.compute bfloat16"),
        ("--per-device-train-batch-size", "--batch.size"),
        ("--training.seq_len", "the nearest is --data.seq-len"),
        ("--optimizer.learning_rate", "here it is --optim.lr"),
        ("--output-dir", "here it is --work-dir"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(capsys, typed, said):
    with pytest.raises(SystemExit) as left:
        parse([typed, "3"], RECIPES, "prog")
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: unknown flag {typed}; ")
    assert said in line
