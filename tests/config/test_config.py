"""Flags, checks and the JSON form of the run's configuration."""

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from mjax.ckpt.config import CkptConfig
from mjax.cli import flags
from mjax.config.command_line import Command, parse, shared_facts, to_flags
from mjax.config.run import ObserveConfig
from mjax.config.sizes import check_sizes
from mjax.config.step import BatchConfig
from mjax.config.train import (
    MAY_CHANGE,
    TrainConfig,
    flattened,
    from_json,
    run_differences,
    to_fields,
    to_json,
    with_tokenizer,
)
from mjax.data.config import NEWEST, DataConfig
from mjax.mesh.axes import AxisSizes, MeshConfig
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig

RECIPES = {
    "demo": TrainConfig,
    "debug": lambda: TrainConfig(steps=7),
    "gpt-125m": lambda: TrainConfig(model=ModelConfig(layers=12)),
}


def read(*argv: str) -> tuple[TrainConfig, Command]:
    return parse(argv, RECIPES, "python -m mjax.train")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the message, unwrapped, with which a command line is refused."""
    with pytest.raises(SystemExit) as error:
        read(*argv)
    assert error.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return re.sub(r"[\s╭╮╰╯─│]+", " ", err)


def test_a_path_without_a_flag_is_taken_for_the_work_dir(capsys):
    there = "to start or resume a run there: --work-dir runs/mine "
    said = refused(capsys, "runs/mine")
    assert said == f"error: unexpected word runs/mine; {there}"
    assert refused(capsys, "--recipe", "debug", "runs/mine").endswith(there)
    assert "put quotes" in refused(capsys, "--data.tokenizer", "my", "t.json")


def sizes(**given: int) -> AxisSizes:
    return AxisSizes(**({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | given))


# ------------------------------------------------------------------------------- flags


def test_the_flags_of_the_contract_reach_their_fields():
    argv = """--work-dir w --steps 9 --seed 3 --simulate-devices 8 --zero 1
        --peak-tflops 989.5 --device-memory-gib 80
        --mesh.pp 1 --mesh.dp -1 --mesh.dp-shard 2 --mesh.tp 2
        --batch.size 32 --batch.microbatches 2
        --model.layers 3 --model.d-model 96 --model.heads 6 --model.kv-heads 2
        --model.d-ff 200 --model.window 128 None 64 --model.block serial
        --model.attention reference
        --data.path corpus/ more.txt --data.tokenizer train:8192 --data.seq-len 512
        --optim.name adamw --optim.lr 3e-4
        --precision.params float32 --precision.compute float32
        --precision.reduce bfloat16
        --ckpt.every 5 --eval.every 6 --log.every 1"""
    config, command = read(*argv.split())
    assert command == Command()
    values = dataclasses.asdict(config)
    expected = {
        "work_dir": "w",
        "steps": 9,
        "seed": 3,
        "simulate_devices": 8,
        "zero": 1,
        "peak_tflops": 989.5,
        "device_memory_gib": 80.0,
        "mesh": {"pp": 1, "dp": -1, "dp_shard": 2, "tp": 2},
        "batch": {"size": 32, "microbatches": 2},
        "model": {
            "layers": 3,
            "d_model": 96,
            "heads": 6,
            "kv_heads": 2,
            "d_ff": 200,
            "window": (128, None, 64),
            "block": "serial",
            "attention": "reference",
        },
        "data": {
            "path": ("corpus/", "more.txt"),
            "tokenizer": "train:8192",
            "seq_len": 512,
        },
        "optim": {"name": "adamw", "lr": 3e-4},
        "precision": {
            "params": "float32",
            "compute": "float32",
            "reduce": "bfloat16",
        },
        "ckpt": {"every": 5},
        "eval": {"every": 6},
        "log": {"every": 1},
    }
    for name, value in expected.items():
        if isinstance(value, dict):
            assert {key: values[name][key] for key in value} == value
        else:
            assert values[name] == value


def test_no_flags_give_the_demo_recipe_unchanged():
    assert read() == (TrainConfig(), Command())


def test_a_flag_overrides_the_recipe_and_the_rest_of_it_stays():
    config, command = read("--model.d-model", "256", "--recipe", "gpt-125m")
    assert command.recipe == "gpt-125m"
    assert config == TrainConfig(model=ModelConfig(layers=12, d_model=256))


def test_a_recipe_can_be_named_with_an_equals_sign():
    assert read("--recipe=debug")[0].steps == 7


def test_underscores_are_as_good_as_hyphens():
    assert read("--mesh.dp_shard", "4", "--work_dir", "w") == read(
        "--mesh.dp-shard", "4", "--work-dir", "w"
    )


def test_a_window_of_one_number_holds_for_all_layers():
    assert read("--model.window", "128")[0].model.window == (128,)


def test_switches_are_off_unless_given():
    _, command = read("--print-config", "--dry-run")
    assert command == Command(print_config=True, dry_run=True)


def test_help_shows_the_flags_in_groups(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        read("--recipe", "debug", "-h")
    assert error.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        if dataclasses.is_dataclass(field.type):
            assert f"\n{field.name}: " in text
    assert "--model.d-ff" in text
    assert "(default 7)" in text  # of the recipe that was named


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--optim.nam", "--optim.name"),
        ("--model.widnow", "--model.window"),
        ("--lr", "--optim.lr"),
        ("--tp=2", "--mesh.tp"),
        ("--mesh.dp_shards", "--mesh.dp-shard"),
        ("--print-cfg", "--print-config"),
    ],
)
def test_an_unknown_flag_names_the_nearest_one(
    capsys: pytest.CaptureFixture[str], given: str, nearest: str
):
    message = refused(capsys, given, "2")
    assert f"unknown flag {given.partition('=')[0]}" in message
    assert message.rstrip().endswith(f"the nearest is {nearest}")


def test_v_is_short_for_verbose() -> None:
    for word in ("-v", "--verbose"):
        _, command = parse([word, "--seed", "3"], RECIPES, "mjax")
        assert command == Command(verbose=True)


def test_an_unknown_recipe_names_the_nearest_one(capsys: pytest.CaptureFixture[str]):
    message = refused(capsys, "--recipe", "gpt-124m")
    assert "unknown recipe gpt-124m; the nearest is gpt-125m" in message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--optim.name sgd", ["sgd", "--optim.name", "lamb", "adamw"]),
        ("--steps many", ["many", "--steps"]),
        ("--mesh.tp", ["--mesh.tp"]),
        ("--recipe", ["--recipe"]),
        ("stray", ["stray"]),
        ("--steps 0", ["error: --steps must be at least 1, got 0"]),
        ("--seed -1", ["--seed must be from 0 to 4294967295, got -1"]),
        ("--zero 4", ["--zero must be from 0 to 3, got 4; 0 shards nothing"]),
        ("--zero 3 --mesh.pp 2", ["--zero 3 needs", "--mesh.pp 2", "--zero 2"]),
        (
            "--zero 0 --mesh.gather-first",
            ["--mesh.gather-first out; if", "use --mesh.no-gather-first"],
        ),
        ("--simulate-devices 0", ["--simulate-devices", "got 0"]),
        ("--peak-tflops 0", ["--peak-tflops must be positive and finite, got 0"]),
        ("--work-dir=", ["--work-dir is empty"]),
        ("--work-dir gs://b/run", ["must be a folder", "got the URL gs://b/run"]),
        ("--data.seq-len 0", ["error: --data.seq-len must be at least 1, got 0"]),
        ("--peak-tflops nan", ["--peak-tflops must be positive and finite, got nan"]),
        ("--mesh.tp -1", ["got dp and tp", "all but one of --mesh.dp, --mesh.tp"]),
        ("--mesh.tp 0", ["error: --mesh.tp must be at least 1", "got 0"]),
        ("--optim.name lam", ["unknown --optim.name lam; the nearest is lamb"]),
        (
            "--pipeline.schedule 1F1B",
            ["unknown --pipeline.schedule 1F1B; the nearest is 1f1b (of gpipe, 1f1b"],
        ),
        (
            "--mesh.pp 2.0",
            ["--mesh.pp must be a whole number, got 2.0; the nearest is 2"],
        ),
        (
            "--zero 3 --pipeline.chunks 2",
            ["--zero 3", "--pipeline.chunks 2:", "--zero 2"],
        ),
        *(
            (
                f"--zero 3 --model.remat {remat}",
                ["--model.remat core, dots, full or offload"],
            )
            for remat in ("none", "attention")
        ),
        *(
            (
                f"--model.remat offload --model.offload-horizon {horizon}",
                [f"--model.offload-horizon must be at least 1, got {horizon}; 1 loads"],
            )
            for horizon in (0, -1)
        ),
        (
            "--model.layers 4 --model.remat offload --model.offload-horizon 4",
            [
                "--model.offload-horizon must be below --model.layers 4, got 4",
                "use --model.offload-horizon 3 or less, or --model.remat full",
            ],
        ),
        (
            "--model.layers 1 --model.remat offload",
            ["--model.layers of at least 2, got 1", "use --model.remat full"],
        ),
        (
            "--model.remat full --model.offload-horizon 2",
            [
                "--model.offload-horizon 2 needs --model.remat offload, got "
                "--model.remat full; leave --model.offload-horizon out, or set it "
                "to None if a resumed run sets it",
            ],
        ),
        ("--pipeline.chunks 0", ["error: --pipeline.chunks must be at least 1, got 0"]),
        ("--device-memory-gib 0", ["--device-memory-gib must be positive", "0.0"]),
    ],
)
def test_a_bad_value_ends_with_one_message_that_names_it(
    capsys: pytest.CaptureFixture[str], argv: str, parts: list[str]
):
    message = refused(capsys, *argv.split())
    assert [part for part in parts if part not in message] == []


def with_every_field(value: int | str) -> list[tuple[str, Any]]:
    """Pair each field that can hold this value, in its own type, with it."""

    def walk(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, hint in typing.get_type_hints(cls).items():
            kinds = [hint, *typing.get_args(hint)]
            if dataclasses.is_dataclass(hint):
                yield from walk(hint, f"{prefix}{name}.")
            elif typing.get_origin(hint) is tuple and type(value) in kinds:
                yield prefix + name, (value,)
            elif type(value) in kinds:
                yield prefix + name, value
            elif isinstance(value, int) and float in kinds:
                yield prefix + name, float(value)

    return list(walk(TrainConfig, ""))


IN_USE = {
    "mesh.tp_overlap": "chunks",
    "mesh.pp": 2,
    "pipeline.chunks": 2,
    "optim.schedule": "wsd",
    "optim.skip_spike_factor": 2.0,
    "ckpt.local_dir": "copies",
}
"""Options that read fields which nothing reads without them."""


def with_values(values: dict[str, Any]) -> TrainConfig:
    """Make a config with these fields, each checked as a flag would be."""
    nested: dict[str, Any] = {}
    for field, value in values.items():
        *parts, name = field.split(".")
        functools.reduce(lambda at, part: at.setdefault(part, {}), parts, nested)[
            name
        ] = value
    return from_json(json.dumps(nested))


@pytest.mark.parametrize("options", [{}, IN_USE], ids=["alone", "in use"])
@pytest.mark.parametrize(("field", "value"), with_every_field(-5))
def test_no_number_may_be_minus_five_whatever_reads_it(
    capsys: pytest.CaptureFixture[str],
    field: str,
    value: float | tuple[float],
    options: dict[str, Any],
):
    """A range that is checked only where an option is in use lets mistakes through."""
    value = value[0] if isinstance(value, tuple) else value
    values = options | {field: value}
    if field == "model.logit_scale":  # the one number with a sign
        assert with_values(values).model.logit_scale == -5
        return
    argv = [f"--{name.replace('_', '-')}={given}" for name, given in values.items()]
    message = refused(capsys, *argv)
    flag = re.escape(f"--{field.replace('_', '-')}")
    assert re.search(rf"error: {flag} must [^;]*, got -5", message), message


@pytest.mark.parametrize(("field", "value"), with_every_field(""))
def test_no_text_may_be_empty(field: str, value: str | tuple[str]):
    name = field.rpartition(".")[2]
    with pytest.raises(ValueError, match=f"{name}|{name.replace('_', '-')}"):
        with_values({field: value})


def test_every_field_has_a_line_of_documentation():
    """The help of a field is its docstring."""
    known = [*flags.flags_of(Command), *flags.flags_of(TrainConfig)]
    assert [flag.name for flag in known if not flag.doc] == []


# ------------------------------------------------------------------------------- sizes


def test_sizes_that_divide_are_accepted():
    config = TrainConfig(
        model=ModelConfig(heads=8, kv_heads=2), batch=BatchConfig(size=16)
    )
    check_sizes(config, sizes(dp_shard=2, dp_replicate=2, tp=4))


def test_offload_needs_the_ring_buffers_only_where_there_is_a_pipeline():
    config = TrainConfig(model=ModelConfig(remat="offload"))
    check_sizes(config, sizes())
    pipeline = PipelineConfig(stash="input")
    check_sizes(dataclasses.replace(config, pipeline=pipeline), sizes(pp=4))


def test_kv_heads_fewer_than_tp_are_replicated():
    check_sizes(TrainConfig(model=ModelConfig(heads=8, kv_heads=1)), sizes(tp=8))


def test_the_tokenizers_size_wins_over_the_recipes():
    config = TrainConfig(model=ModelConfig(vocab_size=64_000))
    assert with_tokenizer(config, 300).model.vocab_size == 300


def test_the_models_vocabulary_is_kept_when_asked():
    config = TrainConfig(
        model=ModelConfig(vocab_size=64_000), data=DataConfig(vocab="model")
    )
    assert with_tokenizer(config, 300) == config


def test_a_kept_vocabulary_must_hold_the_tokenizers_ids():
    config = TrainConfig(
        model=ModelConfig(vocab_size=256), data=DataConfig(vocab="model")
    )
    with pytest.raises(
        ValueError, match=r"least 300 .*, got 256.*--model.vocab-size 300"
    ):
        with_tokenizer(config, 300)


# ------------------------------------------------------------------ JSON, and resuming


def every_field_changed() -> dict[str, Any]:
    """Make the JSON object of a config that shares no value with the default one."""

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: change(part) for key, part in value.items()}
        return f"not {value}"

    changed = change(to_fields(TrainConfig()))
    changed["data"]["skip"] = ["4:1"]  # which is read, and may grow
    return changed


def test_a_config_survives_json_exactly():
    config = TrainConfig(
        steps=3,
        peak_tflops=0.1 + 0.2,
        model=ModelConfig(window=(8, None), norm_eps=1e-6),
        data=DataConfig(path=("a", "b é")),
        mesh=MeshConfig(dp_shard=2),
    )
    again = from_json(to_json(config))
    assert again == config
    assert hash(again) == hash(config)  # lists would not be hashable


def test_an_absent_field_has_its_default_and_the_data_version_that_of_old_runs():
    assert from_json('{"steps": 5, "model": {"layers": 2}}') == TrainConfig(
        steps=5, model=ModelConfig(layers=2), data=DataConfig(version=1)
    )
    old = to_fields(TrainConfig())
    del old["data"]["version"]
    assert run_differences(old, TrainConfig(data=DataConfig(version=1))) == []
    assert run_differences(old, TrainConfig()) == [("data.version", 1, NEWEST)]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "demo"])
def test_flags_give_a_config_back(recipe: str):
    config, base = RECIPES[recipe](), RECIPES["demo"]()
    words = to_flags(config, base)
    assert parse(words, RECIPES, "x")[0] == config
    assert to_flags(config, config) == []


def test_flags_of_every_kind_give_a_config_back():
    config = TrainConfig(
        steps=3,
        peak_tflops=0.1 + 0.2,
        keep_compiled=False,
        model=ModelConfig(window=(8, None), mlp_bias=True, rope=(True, False)),
        data=DataConfig(path=("a", "b é"), skip=("40:12",)),
        mesh=MeshConfig(dp_shard=2, pp=-1, dp=2),
        observe=ObserveConfig(spans=False, stamps=False, slow_step_factor=None),
    )
    words = to_flags(config, TrainConfig())
    assert {"--no-keep-compiled", "--model.mlp-bias", "--observe.no-spans"} <= {*words}
    back = to_flags(TrainConfig(), config)  # tuples become empty, too
    assert words[words.index("--observe.stamps") + 1] == "False"
    assert back[back.index("--data.skip") + 1].startswith("--")


def test_a_text_that_looks_like_an_absent_value_is_no_flag():
    config = TrainConfig(data=DataConfig(cache_dir="None"))
    with pytest.raises(ValueError, match="do not reproduce the config"):
        to_flags(config, TrainConfig())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": {"layer": 2}}', "unknown field model.layer; .* is model.layers"),
        ('{"stepz": 2}', "unknown field stepz; the nearest is steps"),
        ('{"model": 3}', "model must be an object of fields, got 3"),
        ("[]", r"the config must be an object of fields, got \[\]"),
        ('{"steps": 0}', "--steps must be at least 1, got 0"),
        ("not json", "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"steps": "5"}', "steps must be a whole number, got '5'"),
        ('{"steps": true}', "steps must be a whole number, got True"),
        ('{"model": {"layers": null}}', r"model\.layers must be a whole number"),
        ('{"model": {"window": [[8]]}}', r"model\.window\[0\] must be a whole number"),
        ('{"model": {"block": []}}', r"model\.block must be one of '"),
    ],
)
def test_json_that_is_no_config_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        from_json(text)


def test_an_equal_run_has_no_differences():
    old = to_fields(TrainConfig())
    assert run_differences(old, TrainConfig()) == []


def test_what_a_run_computes_may_not_change():
    old = to_fields(TrainConfig())
    new = TrainConfig(
        seed=1,
        batch=BatchConfig(size=16),
        model=ModelConfig(window=(8,)),
        data=DataConfig(path=("other",)),
    )
    assert run_differences(old, new) == [
        ("batch.size", 8, 16),
        ("data.path", ["stdlib"], ["other"]),
        ("model.window", [None], [8]),
        ("seed", 0, 1),
    ]


def test_only_the_named_fields_may_change():
    """The other side of `MAY_CHANGE`: what a resumed run must leave as it was."""
    held = {
        field for field, _, _ in run_differences(every_field_changed(), TrainConfig())
    }
    assert {field.partition(".")[0] for field in held} == {
        *("model", "data", "optim", "seed", "batch", "precision", "init_from"),
        "lora",
    }
    assert {field for field in held if field.startswith("batch.")} == {"batch.size"}
    model = {f"model.{field.name}" for field in dataclasses.fields(ModelConfig)}
    assert model - held == {
        "model.attention",
        "model.attention_backward",
        "model.offload_horizon",
        "model.remat",
    }
    data = {f"data.{field.name}" for field in dataclasses.fields(DataConfig)}
    assert data - held == {"data.cache", "data.cache_dir"}


def test_processes_share_every_field_that_is_not_of_one_process_or_host():
    facts = shared_facts(TrainConfig(), Command())
    every = {
        f"--{name.replace('_', '-')}"
        for name in flattened(dataclasses.asdict(TrainConfig()))
    }
    assert every - facts.keys() == {
        *("--distributed.coordinator", "--distributed.process-id"),
        *("--distributed.timeout-s", "--data.cache-dir", "--observe.spans-dir"),
    }
    asked = {field.name.replace("_", "-") for field in dataclasses.fields(Command)}
    assert {name.removeprefix("--") for name in facts.keys() - every} == asked - {
        "config",  # what it holds is compared field by field
        "verbose",
    }
    assert next(iter(facts)) == "--recipe"


def test_folders_that_processes_share_are_compared_by_their_absolute_path(
    tmp_path, monkeypatch
):
    def facts(folder, **ckpt):
        monkeypatch.chdir(folder)
        config = TrainConfig(work_dir="runs/a", ckpt=CkptConfig(**ckpt))
        return shared_facts(config, Command())

    (tmp_path / "b").mkdir()
    here = facts(tmp_path, dir="gs://a/b", local_dir="/one")
    there = facts(tmp_path / "b", dir="gs://a/b", local_dir="/two")
    assert here["--work-dir"] == str(tmp_path / "runs" / "a")
    assert there["--work-dir"] != here["--work-dir"]
    assert {name for name in here if here[name] != there[name]} == {"--work-dir"}
    # One process alone would wait for the copies of the others.
    assert facts(tmp_path)["--ckpt.local-dir"] != here["--ckpt.local-dir"]


def test_the_fields_that_may_change_exist():
    names = set(typing.get_type_hints(TrainConfig))
    for field in MAY_CHANGE:
        head, _, tail = field.partition(".")
        assert head in names
        if tail:
            assert hasattr(getattr(TrainConfig(), head), tail)


def test_a_field_younger_than_the_run_counts_as_its_default():
    old = to_fields(TrainConfig())
    del old["model"]["dropout"]
    assert run_differences(old, TrainConfig()) == []
    assert run_differences(old, TrainConfig(model=ModelConfig(dropout=0.1))) == [
        ("model.dropout", 0.0, 0.1)
    ]


def test_a_field_that_the_program_forgot_is_a_difference():
    old = to_fields(TrainConfig())
    old["model"]["experts"] = 4
    assert run_differences(old, TrainConfig()) == [("model.experts", 4, None)]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"remote": "runs/a"}, "--ckpt.remote must be s3://BUCKET/PREFIX"),
        ({"remote": "s3://bucket/"}, "add a prefix.*s3://bucket/RUN"),
        ({"remote": "s3://bucket/a", "dir": "gs://b/a"}, "--ckpt.dir must be a folder"),
        ({"remote": "s3://bucket/a", "remote_keep": 0}, "--ckpt.remote-keep must be"),
        ({"remote_stop_wait_s": 0}, "--ckpt.remote-stop-wait-s must be at least 1"),
    ],
)
def test_a_wrong_place_for_copies_of_checkpoints_is_refused(flags, reason):
    with pytest.raises(ValueError, match=reason):
        CkptConfig(**flags)
