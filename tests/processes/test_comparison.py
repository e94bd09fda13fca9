"""Differences between processes are reported with the processes."""

from pathlib import Path

import mjax
from mjax.processes import comparison
from mjax.processes.comparison import check_same, code_facts, environment_facts
from tests.processes.test_agreement import ended, members


def said(facts, fix="Start them alike"):
    """Return what each process says of its facts."""
    agreements = members(len(facts))
    raised = ended(agreements, lambda a: check_same(a, facts[a.rank], fix))
    assert {type(error) for error in raised} <= {ValueError, type(None)}
    return [None if error is None else str(error) for error in raised]


def test_equal_facts_pass():
    facts = {"--optim.lr": 0.1, "--data.path": ("a", "b"), "--model.window": None}
    assert said([facts] * 3) == [None] * 3
    assert said([facts]) == [None]


def test_a_difference_is_named_with_both_values_in_all_processes():
    facts = [{"--optim.lr": 0.005, "--seed": 0}, {"--optim.lr": 0.1, "--seed": 0}]
    message = (
        "the processes of this run differ:\n"
        "  --optim.lr: 0.1 in process 1, 0.005 in process 0\n"
        "Start them alike"
    )
    assert said(facts) == [message] * 2


def test_processes_of_one_value_are_named_together():
    a, b, c = ({"x": value} for value in ("a", "b", "c"))
    [message] = {*said([a, b, b, a, c, b])}
    assert '  x: "b" in processes 1-2, 5, "c" in process 4, "a" in the other 2' in (
        str(message)
    )


def test_a_fact_that_only_one_process_has_differs():
    [message] = {*said([{"a": 1}, {"a": 1, "b": 2}, {}])}
    assert "  a: null in process 2, 1 in the other 2\n" in str(message)
    assert "  b: 2 in process 1, null in the other 2\n" in str(message)


def test_many_differences_are_counted():
    facts = [{f"{n}": value for n in range(30)} for value in (1, 2)]
    [message] = {*said(facts)}
    lines = str(message).splitlines()
    assert lines[1].startswith("  0: ")
    assert lines[10].startswith("  9: ")
    assert lines[-2] == "  and 20 more"
    assert len(lines) == 13


def test_the_environment_is_compared_but_for_where_xla_dumps():
    environments = (
        {"XLA_FLAGS": "--xla_a=1 --xla_dump_to=/tmp/0 --xla_b", "NCCL_ALGO": "Ring"},
        {
            "XLA_FLAGS": "--xla_b --xla_a=2 --xla_dump_to=/tmp/1",
            "HOME": "/root",
            "XLA_CLIENT_MEM_FRACTION": "0.9",
        },
    )
    [message] = {*said([environment_facts(one) for one in environments])}
    assert str(message).splitlines()[1:-1] == [
        '  XLA_FLAGS --xla_a: "2" in process 1, "1" in process 0',
        '  NCCL_ALGO: null in process 1, "Ring" in process 0',
        '  XLA_CLIENT_MEM_FRACTION: "0.9" in process 1, null in process 0',
    ]


def test_the_code_is_each_file_and_the_versions(tmp_path, monkeypatch):
    facts = code_facts()
    assert facts["mjax/train.py"] != facts["mjax/run/loop.py"]
    for name in ("python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        assert facts[name][0].isdigit()
    assert facts["jax_enable_x64"] is False
    root = Path(mjax.__file__).parent
    assert {f"mjax/{p.relative_to(root)}" for p in root.rglob("*.py")} <= facts.keys()
    (tmp_path / "mjax" / "ckpt").mkdir(parents=True)
    (tmp_path / "mjax" / "ckpt" / "new.py").write_text("x = 1")
    monkeypatch.setattr(comparison.mjax, "__file__", str(tmp_path / "mjax" / "x.py"))
    one = code_facts()["mjax/ckpt/new.py"]
    (tmp_path / "mjax" / "ckpt" / "new.py").write_text("x = 2")
    assert code_facts()["mjax/ckpt/new.py"] != one
