"""The process in which kernels are interpreted: one case after another, over pipes.

    python -m tests.kernels.interpreter.worker

A line on standard input is a case: {"function": "package.module:name", "arguments":
{...}}. The answer on standard output is one line: {"result": ...} has the result of
the function, {"kernel": "..."} the error of a kernel that ran, and {"raised": "..."}
any other exception. `runner` is the other process.
"""

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from typing import Any

from jaxtyping import install_import_hook

from tests.kernels.interpreter import completion


def main() -> None:
    """Answer cases until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep prints out of answers
    install_import_hook("mjax", "beartype.beartype")
    completion.install()

    cases: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            cases.put(line)
        os._exit(0)  # The tests have ended: exit even if a case is running or stuck.

    threading.Thread(target=read, daemon=True).start()
    while True:
        case = json.loads(cases.get())
        answers.write(json.dumps(_answer(**case)) + "\n")
        answers.flush()


def _answer(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module, _, name = function.partition(":")
    completion.reset()
    try:
        return {"result": getattr(importlib.import_module(module), name)(**arguments)}
    except Exception as error:  # Any exception is the answer.
        traceback.print_exc()
        if completion.failures:  # jax may raise a later one
            return {"kernel": _text(completion.failures[0])}
        return {"raised": _text(error)}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
