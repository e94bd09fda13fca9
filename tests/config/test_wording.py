"""One wording for refusals: `--data.seq-len must be at least 1, got 0; the fix`.

That the number of each flag is refused in these words: `test_config`.
"""

import ast
import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import mjax
from mjax.config.train import TrainConfig


def _field_names(cls: type, prefix: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _field_names(typing.cast(type, hint), f"{prefix}{name}.")
        elif prefix:
            yield prefix + name


_FIELDS = "|".join(map(re.escape, _field_names(TrainConfig)))
_BAD = re.compile(
    rf"(?<![\w.-])({_FIELDS})(?![\w.-])"  # data.seq_len: write --data.seq-len
    r"|[<>]=(?!=)"  # write at least, at most
    r"|\bmust .*, not \{\}|\bmust .*[;:] got\b"  # write: must be X, got Y
)


def _messages(source: str) -> Iterator[tuple[int, str]]:
    """Return the lines and texts of all strings of several words but docstrings.

    `{}` stands for what an f-string formats. Messages that a helper makes count too.
    """
    tree = ast.parse(source)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):  # parents come before what they hold
        if isinstance(node, ast.Expr):
            skipped.add(node.value)
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            parts = [
                v.value if isinstance(v, ast.Constant) else "{}" for v in node.values
            ]
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if node not in skipped and " " in text:
            yield node.lineno, text


def test_messages_name_flags_and_values_alike():
    root = Path(mjax.__file__).parent
    bad = [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in sorted(root.rglob("*.py"))
        for line, text in _messages(path.read_text())
        if _BAD.search(text)
    ]
    assert bad == [], "\n".join(bad)


def test_the_search_finds_what_it_forbids():
    source = """
def check(size):
    "A docstring may say data.seq_len >= 1."
    raise ValueError(f"data.seq_len must be positive, got {size}")
    raise ValueError(f"steps must be >= 1, got {size}")
    raise ValueError(f"--steps must be at least 1, not {size}")
    raise ValueError(f"--steps must be at least 1; got {size}")
    raise ValueError(f"--data.seq-len must be at least 1, got {size}; use 64")
"""
    assert [line for line, text in _messages(source) if _BAD.search(text)] == [
        4,
        5,
        6,
        7,
    ]
