"""The pages of failures: meaning and remedy of each message.

Input: the messages of the code (messages.py), and docs/failures.toml with causes and
remedies. Output: a page of failures of running jobs, and a page of all refusals.
"""

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.site.messages import Message

PARTS_OF_A_RUN = (
    *("ckpt", "data", "evaluate", "generate.opened", "hardware", "hugging_face"),
    *("plan", "processes.agreement", "processes.distributed", "processes.key_value"),
    *("run", "trainer", "tune"),
)
"""Modules of mjax whose failures can end a run, an export or an evaluation."""
REFUSALS = ("ValueError", "NotImplementedError")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """An entry of docs/failures.toml.

    Attributes:
      title: what is wrong.
      fragments: parts of our messages that mean it.
      cause: why it happens.
      remedy: what to do.
      printed: last lines that mean it and are not messages of a run, such as Python's
        own; words in braces vary.
    """

    title: str
    fragments: Sequence[str]
    cause: str
    remedy: str
    printed: Sequence[str] = ()


def read(path: Path) -> list[Failure]:
    """Return the entries of a file, in file order."""
    return [Failure(**one) for one in tomllib.loads(path.read_text())["failure"]]


def of_runs(messages: Iterable[Message]) -> list[Message]:
    """Return the messages that need an entry: failures, not refusals, of a run."""
    names = tuple(f"mjax.{part}" for part in PARTS_OF_A_RUN)
    return [
        one
        for one in messages
        if one.base not in (*REFUSALS, "Exception")
        and any(
            one.module == name or one.module.startswith(name + ".") for name in names
        )
    ]


def means(failure: Failure, message: Message) -> bool:
    """Return whether a message is that of a failure."""
    return any(fragment in message.text for fragment in failure.fragments)


def failures_page(failures: Sequence[Failure], messages: Sequence[Message]) -> str:
    """Return the page of failures, with the messages of each."""
    parts = [
        "# Failures\n\nWhat can end a run or an export: the message, its cause, the "
        "remedy. Words in braces are filled in. The first entries are of runs that do "
        "not start; each of their messages is on the page of [refusals](refusals.md). "
        "Exit codes are in "
        "[how a run ends](../docs/design.md#how-a-run-ends). "
        "`python -m mjax.launch first-error --work-dir RUN` says which process failed "
        "first.\n"
    ]
    for failure in failures:
        texts = [m.text for m in of_runs(messages) if means(failure, m)]
        texts += failure.printed
        parts.append(
            f"## {failure.title}\n\n{failure.cause}\n\n**Remedy.** {failure.remedy}\n\n"
            + _block(texts)
        )
    return "\n".join(parts)


def refusals_page(messages: Sequence[Message]) -> str:
    """Return the page of all messages that are not failures of a run, by module."""
    failed = {*of_runs(messages)}
    parts = [
        "# Refusals\n\nEvery message with which bad input is refused, by the module "
        "that says it. Words in braces are filled in. A message names the rule and "
        "the value; what to write instead follows the semicolon.\n"
    ]
    rest = (one for one in messages if one not in failed)
    for module, group in itertools.groupby(rest, lambda one: one.module):
        parts.append(f"## {module}\n\n{_block([one.text for one in group])}")
    return "\n".join(parts)


def _block(texts: Iterable[str]) -> str:
    """Return unique texts as a list of code, which wraps on a narrow screen."""
    lines = dict.fromkeys(re.sub(r"\s+", " ", text).strip() for text in texts)
    return "".join(f"- {_code(line)}\n" for line in lines)


def _code(line: str) -> str:
    """Return a code span of a line, between more backticks than it has in a row."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}"
