"""Import a package with one of its modules changed: a bug planted on purpose."""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def changed(module: str, edits: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Import the package of a module again, with edits, within this context.

    Args:
      module: dotted name.
      edits: (text, its replacement), in order. A text must occur exactly once. Any
        white space matches any other, so a text may span lines.

    Raises:
      ValueError: a text does not occur once.
    """
    text = source(module)
    for old, new in edits:
        matches = list(re.finditer(r"\s+".join(map(re.escape, old.split())), text))
        if len(matches) != 1:
            raise ValueError(
                f"a text to replace must occur once in {module}, but this one occurs "
                f"{len(matches)} times: {old!r}. Take the text from the module as it "
                "is now"
            )
        begin, end = matches[0].span()
        text = text[:begin] + new + text[end:]
    finder = _Finder(module, text)
    package = module.rpartition(".")[0]
    _forget(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget(package)


def source(module: str) -> str:
    """Return the text of a module's file."""
    spec = importlib.util.find_spec(module)
    if not (spec and spec.origin):
        raise ValueError(f"{module} has no source")
    return Path(spec.origin).read_text()


def _forget(package: str) -> None:
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import hook that loads the given text as the source of one module."""

    def __init__(self, module: str, text: str):
        self.module = module
        self.text = text

    def find_spec(self, fullname, path, target=None):
        if fullname != self.module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def get_source(self, fullname):
        return self.text
