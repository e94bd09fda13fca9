"""Rules are checked before any line is read, and a bad one is named."""

import time
from pathlib import Path

import pytest

from mjax.health.events import patterns, rules
from mjax.health.events.rules import Limits, filled

GOOD = {
    "name": '"flap"',
    "pattern": "'Port: (?P<port>[0-9]+) Link DOWN'",
    "event": '{ kind = "flap", text = "{port} went down" }',
    "by": '["port"]',
}
FOLDER = Path(rules.__file__).parent


def text(**changes):
    lines = (f"{k} = {v}" for k, v in (GOOD | changes).items())
    return "[[rule]]\n" + "\n".join(lines) + "\n"


def test_a_rule_is_read_with_its_defaults():
    (rule,) = rules.parse(text()).rules
    assert (rule.name, rule.count, rule.by) == ("flap", 1, ("port",))
    assert (rule.policy, rule.action, rule.event.severity) == ("confirm", (), "warning")


@pytest.mark.parametrize("name", ["ufm", "kernel"])
def test_the_shipped_rules_are_read_have_sources_and_run_nothing_unasked(name):
    found = rules.read(FOLDER / f"{name}_rules.toml").rules
    assert len(found) >= 6
    assert all(rule.source for rule in found)
    assert "run" not in {rule.policy for rule in found}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuont": "3"}, "unknown key cuont; did you mean count?"),
        (
            {"event": '{ kind = "a", txt = "b" }'},
            "unknown key event: txt; did you mean text?",
        ),
        ({"pattern": "'(?P<port>['"}, "is invalid: unterminated character set"),
        ({"pattern": "'(?P<port>(a+)+)b'"}, "a choice or a repeat inside a repeat"),
        ({"pattern": "'(?P<port>x*)'"}, "matches an empty line"),
        (
            {"by": '["prot"]'},
            "by: the pattern has no group prot; did you mean port?",
        ),
        (
            {"ticket": '"{prot}"'},
            "ticket: '{prot}' uses an unknown name: prot; did you mean port?",
        ),
        ({"ticket": '"{port.__class__}"'}, "only plain {names} are allowed"),
        ({"ticket": '"{port!r}"'}, "only plain {names} are allowed"),
        ({"ticket": '"{port"'}, "ticket: '{port': expected '}'"),
        ({"action": '["x", "{prot}"]'}, "action: '{prot}' uses an unknown name: prot"),
        ({"action": '["{port}"]'}, "the program must be a fixed name, got '{port}'"),
        ({"action": '["x"]', "by": "[]"}, "an action needs `by`"),
        (
            {"action": '["x"]', "undo": '["y"]'},
            "test and undo need each other and an action",
        ),
        (
            {"test": '["x"]', "undo": '["y"]'},
            "test and undo need each other and an action",
        ),
        ({"count": "0"}, "count must be 1 to 10000, got 0"),
        ({"count": "2"}, "count 2 needs within_s above 0"),
        ({"count": "2.5"}, "count must be a whole number, got 2.5"),
        ({"cool_down_s": "-1"}, "cool_down_s must be 0 to 1e9 seconds, got -1"),
        ({"within_s": "nan"}, "within_s must be 0 to 1e9 seconds, got nan"),
        ({"policy": '"always"'}, "policy must be one of 'tell', 'confirm', 'run'"),
        ({"log": '"dmesg"'}, "log must be one of 'any', 'kernel', 'syslog', 'ufm'"),
    ],
)
def test_a_bad_rule_is_refused_with_its_name(changes, message):
    with pytest.raises(ValueError, match="rule flap: ") as caught:
        rules.parse(text(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("", "there is no rule"),
        ("rule = 3", "there is no rule"),
        ("[[rules]]", "unknown table rules; did you mean rule?"),
        ("[[rule]]\npattern = 'a'", "rule 1 (no name): "),
        ("x = ", "not TOML"),
        (text() + text(), "two rules are named flap"),
        (
            text() + "[limits]\nmax_disabled = -1",
            "limits: max_disabled must be at least",
        ),
        (text() + "[limits]\nmost = 1", "limits: unknown key most"),
    ],
)
def test_a_bad_file_is_refused(toml, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared
        rules.parse(toml)
    assert message in str(caught.value)


def test_binary_junk_and_an_absent_file_are_refused_with_the_flag(tmp_path):
    junk = tmp_path / "rules.toml"
    junk.write_bytes(b"\x00\xff\xfe[[rule]]")
    for path in (junk, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"^--rules .* cannot be read"):
            rules.read(path)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a|a)*b", "(a+)+b", "(?:a?){30}b", "a*b*a*c", "foo.*bar.*baz"),
        *(r"(a)\1", "(?=a)b", "(?i)a", r"\d+\w+\d+x", "a?" * 30 + "b"),
    ],
)
def test_a_pattern_that_may_take_long_is_refused(pattern):
    with pytest.raises(ValueError, match="pattern "):
        patterns.compiled(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["foo.*bar", "^foo.*bar.*baz", r"\d+[a-z]+x", "[^ ]+ [^ ]+ [^ ]+ x", "(?:a|bc)d"],
)
def test_a_pattern_that_is_allowed_ends_soon_on_hostile_lines(pattern):
    """Measured in CPU time: an exponential pattern would not end during the test."""
    regex = patterns.compiled(pattern)
    pieces = ("foo", "foobar", "a", "1", "ab ", "bc", "x ", "foo bar ba")
    start_s = time.process_time()
    for piece in pieces:
        regex.search((piece * 4096)[:4096])
    assert time.process_time() - start_s < 10


def test_a_value_is_never_read_as_a_template():
    assert filled("{a} and {b} {{x}}", {"a": "{b}", "b": "2"}) == "{b} and 2 {x}"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        *(({}, 2), ({"num_devices": 1000}, 2), ({"num_devices": 39}, 1)),
        *(({"num_devices": 40}, 2), ({"num_devices": 19}, 0), ({"max_disabled": 0}, 0)),
        ({"max_disabled": 80, "num_devices": 1000}, 50),
    ],
)
def test_the_smaller_of_number_and_share_limits_what_is_out_of_use(fields, most):
    assert Limits(**fields).most == most
