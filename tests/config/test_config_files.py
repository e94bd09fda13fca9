"""Config files: what they may hold, what they are laid over, what is refused."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mjax.config.command_line import Command, names_recipe, parse, shared_facts
from mjax.config.train import TrainConfig, to_json
from mjax.recipes import RECIPES
from mjax.records.config_json import FORMAT


def read(*words: str, base: TrainConfig | None = None) -> tuple[TrainConfig, Command]:
    return parse(words, RECIPES, "prog", base=base)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        read(*words)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return what writes a file into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "c.toml") -> str:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    return write


TOML = """\
recipe = "debug"
steps = 7
optim.lr = 3e-4  # dotted

[mesh]
tp = 2
"tp-overlap" = "chunks"

[model]
window = [64, "None"]
kv_heads = "None"
"""
JSON = """\
{
  "recipe": "debug",
  "steps": 7,
  "optim.lr": 0.0003,
  "mesh": {"tp": 2, "tp_overlap": "chunks"},
  "model": {"window": [64, null], "kv_heads": null}
}
"""


def wanted() -> TrainConfig:
    debug = RECIPES["debug"]()
    return dataclasses.replace(
        debug,
        steps=7,
        optim=dataclasses.replace(debug.optim, lr=3e-4),
        mesh=dataclasses.replace(debug.mesh, tp=2, tp_overlap="chunks"),
        model=dataclasses.replace(debug.model, window=(64, None), kv_heads=None),
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [(TOML, "c.toml"), (JSON, "c.json"), (TOML, "c"), (JSON, "c.conf")],
)
def test_a_partial_file_lies_over_the_recipe_that_it_names(config, text, name):
    found, command = read("--config", config(text, name))
    assert found == wanted()
    assert (command.recipe, command.config) == ("debug", name)


def test_flags_go_before_the_file_and_the_file_before_the_recipe(config):
    path = config(TOML)
    found, _ = read("--steps", "9", "--config", path, "--mesh.tp=4")
    assert (found.steps, found.mesh.tp, found.optim.lr) == (9, 4, 3e-4)
    warmup = ("--optim.warmup-steps", "7")
    found, command = read("--recipe", "gpt-125m", "--config", path, *warmup)
    assert (command.recipe, found.model.layers, found.steps) == ("gpt-125m", 12, 7)
    found, command = read("--config", config("steps = 700\n"))
    assert found == dataclasses.replace(RECIPES["demo"](), steps=700)


@pytest.mark.parametrize("name", RECIPES)
def test_what_print_config_prints_is_read_back(config, name, capsys):
    path = config(to_json(RECIPES[name]()), "run.json")
    assert read("--config", path)[0] == RECIPES[name]()
    assert read("--recipe", "debug", "--config", path)[0] == RECIPES[name]()
    assert capsys.readouterr().err == ""


def test_an_almost_whole_config_without_a_recipe_says_what_fills_it_up(config, capsys):
    fields = json.loads(to_json(RECIPES["debug"]()))
    del fields["model"]["tie_embeddings"]
    found, _ = read("--config", config(json.dumps(fields), "old.json"))
    assert found.model.tie_embeddings == RECIPES["demo"]().model.tie_embeddings
    assert capsys.readouterr().err == (
        "note: old.json names no recipe; missing fields (1) are taken from --recipe "
        "demo: --model.tie-embeddings\n"
    )


def test_the_config_of_an_older_run_is_read_unless_a_field_has_no_flag_now(
    config, capsys
):
    fields = json.loads(to_json(RECIPES["debug"]()))
    del fields["format"]
    fields["log"]["tensorboard"] = False
    path = config(json.dumps(fields), "old.json")
    assert read("--config", path)[0] == RECIPES["debug"]()
    for text, problem in (
        (
            "log.tensorboard = true",
            "log.tensorboard True was removed; use --track tensorboard",
        ),
        (
            f"format = {FORMAT + 1}",
            f"its format is {FORMAT + 1}, and this version of mjax reads formats up to "
            f"{FORMAT}; use the version that wrote it, or a newer one",
        ),
    ):
        path = config(f"{text}\n")
        with pytest.raises(SystemExit):
            read("--config", path)
        assert f"{path}, line 1: {problem}" in capsys.readouterr().err


def test_a_file_may_hold_what_the_command_is_asked(config):
    _, command = read("--config", config("dry_run = true\nprint-mesh = true\n"))
    assert command.dry_run
    assert command.print_mesh


def test_a_file_without_a_recipe_lies_over_the_run_that_is_resumed(config):
    run = dataclasses.replace(RECIPES["debug"](), steps=30, work_dir="runs/a")
    path = config("log.every = 3\n")
    assert not names_recipe(["--config", path])
    found, _ = read("--config", path, base=run)
    assert found == dataclasses.replace(run, log=dataclasses.replace(run.log, every=3))
    path = config(TOML)
    assert names_recipe(["--config", path])
    assert read("--config", path, base=run)[0] == wanted()


def test_where_the_file_lies_is_not_compared_between_processes(config):
    here = config(TOML, "here.toml")
    there = config(JSON, "there.json")
    assert shared_facts(*read("--config", here)) == shared_facts(
        *read("--config", there)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'steps = "7"\n',
            "line 1: steps must be a whole number, got '7'; write it without quotes",
        ),
        ("steps = 7.5\n", "line 1: steps must be a whole number, got 7.5"),
        ("steps = true\n", "line 1: steps must be a whole number, got True"),
        (
            "[mesh]\n\ntpp = 2\n",
            "line 3: unknown field mesh.tpp; the nearest is mesh.tp",
        ),
        (
            "[optim]\nlearning_rate = 1\n",
            "line 2: unknown field optim.learning_rate; here it is optim.lr",
        ),
        (
            "mesh = {tp = 1, pq = 2}\n",
            "line 1: unknown field mesh.pq; the nearest is mesh.tp",
        ),
        ("\n[mdoel]\n", "line 2: unknown field mdoel; the nearest is model"),
        ("mesh = 3\n", "line 1: mesh must be a table of fields, got 3"),
        ("[steps]\na = 1\n", "line 2: steps must be a whole number, got a table"),
        (
            '[model]\nremat = "ful"\n',
            "line 2: unknown model.remat ful; the "
            "nearest is full (of none, attention, core, dots, full, offload)",
        ),
        (
            '[data]\npath = "stdlib"\n',
            "line 2: data.path must be a list, got 'stdlib'; write [\"stdlib\"]",
        ),
        (
            "steps = 1979-05-27\n",
            "line 1: steps must be a whole number, got datetime.date(1979, 5, 27)",
        ),
        (
            'config = "d.toml"\n',
            "line 1: config applies to a single start; leave it out, "
            "and give --config on the command line",
        ),
        (
            "restart_from_scratch = true\n",
            "line 1: restart_from_scratch applies to "
            "a single start; leave it out, and give --restart-from-scratch on the "
            "command line",
        ),
        (
            "[distributed]\nprocess_id = 0\n",
            "line 2: distributed.process_id applies "
            "to a single start; leave it out, and give --distributed.process-id on the "
            "command line",
        ),
        ("steps == 3\n", "c.toml is not TOML: Invalid value (at line 1, column 8)"),
        ("", "--config c.toml is empty; add values, or leave the flag out"),
        (b"\xff\xfe", "--config c.toml is not UTF-8 text (byte 0)"),
        (
            'x = """\nsteps = 1\n"""\n[mesh]\ntp = "a"\n',
            "line 1: unknown field x; --print-config prints all fields",
        ),
        (
            "[mesh]\ntp = 0\n",
            "--mesh.tp must be at least 1, got 0 "
            "(c.toml: --mesh.tp is given in line 2)",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_line(config, capsys, text, message):
    found = refused(capsys, "--config", config(text))
    assert found == (f"c.toml, {message}" if message.startswith("line") else message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"steps": 3,\n\n "steps": 4}',
            "line 3: steps is given twice, in line 1 too; leave one out",
        ),
        (
            '{"mesh": {"tp": 3},\n "mesh.tp": 4}',
            "line 2: mesh.tp is given twice, in line 1 too; leave one out",
        ),
        (
            '{"mesh": {\n "tp": 3,\n "tp": 4}}',
            "line 3: tp is given twice, in line 2 too; leave one out",
        ),
        (
            '{\n "mesh": {"tp": "two"}}',
            "line 2: mesh.tp must be a whole number, got "
            "'two'; write it without quotes",
        ),
        ("[1]", "line 1: a config must be an object of fields, got [1]"),
        ('{"a": ' * 3000 + "1" + "}" * 3000, None),
    ],
)
def test_a_bad_json_file_is_refused_with_its_line(config, capsys, text, message):
    found = refused(capsys, "--config", config(text, "c.json"))
    assert found == (f"c.json, {message}" if message else "c.json: nested too deeply")


def test_json_that_cannot_be_parsed_names_the_place(config, capsys):
    found = refused(capsys, "--config", config('{"steps": 3', "c.json"))
    assert found.startswith("c.json is not JSON: line 1, column 12: ")


def test_a_flag_over_a_bad_value_of_the_file_is_enough(config):
    found, _ = read("--config", config("[mesh]\ntp = 0\n"), "--mesh.tp", "2")
    assert found.mesh.tp == 2


def test_a_file_that_is_not_there_says_so(config, capsys, tmp_path):
    found = refused(capsys, "--config", "absent.toml")
    assert found == f"--config absent.toml does not exist (looked from {tmp_path})"
    assert refused(capsys, "--config", ".").endswith("cannot be read: Is a directory")
    assert refused(capsys, "--config", "a.yaml").endswith("write TOML or JSON")
    assert refused(capsys, "--config", "--steps", "3").startswith(
        "--config needs a value"
    )
    assert refused(capsys, "--config=").startswith("--config needs a value")
    found = refused(capsys, "--config", config("# " + "x" * 2**20, "large.toml"))
    assert found == "--config large.toml is larger than 1 MiB, so it is not a config"


def test_every_field_of_the_line_of_a_toml_key_is_found(config, capsys):
    """Each field of a whole TOML config, given a wrong type, is named with its line."""
    lines = ["# a comment", "[optim]", 'lr = "x"']
    for blank in range(5):
        text = "\n" * blank + "\n".join(lines)
        assert f"line {blank + 3}: optim.lr" in refused(
            capsys, "--config", config(text)
        )
    assert re.search(
        "line 2: optim.lr", refused(capsys, "--config", config('\noptim.lr="x"'))
    )
