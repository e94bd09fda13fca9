"""Text and chats from the docstrings of the standard library.

Input: the library of this interpreter. Output: text of some modules, to train a base
on, and chats about the functions of other modules. The question contains the dotted
name of a class, method or function and the first half of the first line of its
docstring. There are two tasks:

- lines: the answer is the second half. It cannot be predicted with certainty, so a
  model mostly learns the style of answers.
- kinds: the answer says which of the three it is. That follows from the capitals in the
  name; a model that learns only the style of answers cannot know it.
"""

import ast
import dataclasses
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
NUM_CHATS = {"training": 200, "validation": 100, "held-out": 200}
KINDS = ("class", "method", "function")
_SKIPPED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__")
_LENGTHS = range(30, 81)
_BASE_SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Entry:
    """One documented function, class or method."""

    module: str
    """Top-level name."""
    name: str
    kind: str
    """One of `KINDS`."""
    doc: str

    @property
    def line(self) -> str:
        """First line of the docstring."""
        return self.doc.split("\n", 1)[0].strip()


def entries() -> list[Entry]:
    """Return the documented names of the standard library, in file order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if set(parts) & set(_SKIPPED) or "-" in parts[0]:
            continue
        dotted = ".".join(part for part in parts if part != "__init__")
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        found += [Entry(parts[0], *each) for each in _documented(tree, dotted)]
    return found


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Return names, kinds and docstrings."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    function = "method" if isinstance(node, ast.ClassDef) else "function"
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, defined):
            continue
        name = f"{prefix}.{child.name}"
        doc = ast.get_docstring(child)
        if doc and doc.isascii():
            yield name, "class" if isinstance(child, ast.ClassDef) else function, doc
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, name)


def is_of_base(module: str) -> bool:
    """Return whether the base is trained on a module; chats are about the others."""
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:4]) < _BASE_SHARE * 2**32


def base_texts(found: list[Entry]) -> list[str]:
    """Return the training text of the base: docstrings, each after its name."""
    texts = [f"{e.name}\n{e.doc}\n" for e in found if is_of_base(e.module)]
    return list(dict.fromkeys(texts))


def chats(found: list[Entry], task: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Draw the chats of each split; the questions of all tasks are the same.

    No module is in two splits, and no line is in two chats or in the base's text.

    Args:
      found: the result of `entries`.
      task: lines or kinds.
      seed: of the draw.
    """
    known = {e.line for e in found if is_of_base(e.module)}
    by_module: dict[str, list[dict[str, Any]]] = {}
    for entry in found:
        line = entry.line
        if is_of_base(entry.module) or line in known or len(line) not in _LENGTHS:
            continue
        known.add(line)
        words = line.split()
        first, second = words[: len(words) // 2], words[len(words) // 2 :]
        if first:
            question = f"{entry.name}: {' '.join(first)}"
            answers = {"lines": " ".join(second), "kinds": entry.kind}
            chat = _chat(question, answers[task])
            by_module.setdefault(entry.module, []).append(chat)
    draw = random.Random(seed)
    modules = sorted(by_module)
    draw.shuffle(modules)
    splits: dict[str, list[dict[str, Any]]] = {}
    # Whole modules are added to a split until it has enough to draw from.
    num_all = sum(map(len, by_module.values()))
    for split, wanted in NUM_CHATS.items():
        share = num_all * wanted / sum(NUM_CHATS.values())
        pool: list[dict[str, Any]] = []
        while modules and (len(pool) < wanted or len(pool) < 0.8 * share):
            pool += by_module[modules.pop()]
        assert len(pool) >= wanted, f"{len(pool)} chats for {split}"
        splits[split] = draw.sample(pool, wanted)
    return splits


def shuffled(found: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the chats with shuffled answers."""
    answers = [chat["messages"][1]["content"] for chat in found]
    random.Random(seed).shuffle(answers)
    questions = [chat["messages"][0]["content"] for chat in found]
    return [_chat(q, a) for q, a in zip(questions, answers, strict=True)]


def _chat(question: str, answer: str) -> dict[str, Any]:
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": r, "content": c} for r, c in turns]}
