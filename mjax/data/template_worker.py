"""The process that renders chat templates: requests on stdin, answers on stdout.

Input: for each request two lines: the seconds of CPU time that it may take, and a JSON
object {"template", "renders": [variables, ...], "date"}. Output: one JSON object per
line, {"texts", "spans", "unread", "marks", "variables"} or {"error"}. A request that
takes more CPU time ends the process by SIGPROF. A template comes with a model from any
source, and Jinja's sandbox limits neither time nor memory.

This module is run as a file and imports nothing of mjax, so it starts in 0.1 s.

Source: templates may use what transformers 5.23 provides
(`utils/chat_template_utils.py`): immutable sandbox, block trimming, loop controls,
`generation` blocks, `tojson`, `raise_exception`, `strftime_now`. Differs: a text is a
function of the input, so nothing draws at random (`random`, `lipsum`), `strftime_now`
has a given date, and no address is printed; the reply names what the template did not
read.
"""

import contextlib
import datetime
import functools
import json
import re
import resource
import secrets
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

_MEMORY_BYTES = 2**30
"""Maximum memory of this process. A chat of megabytes takes a few times its size."""
_MAX_CHARS = 1 << 24
"""Maximum length of a rendered chat. It is far larger than any chat that fits into a
sequence."""
_NONCE = secrets.token_hex(8)  # random, so no message can contain a mark
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
"""Text of a Python object with its address, which differs from process to process."""
_DATE = "strftime_now"
_START, _END = f"\x02{_NONCE}[", f"\x03{_NONCE}]"


class _Message(dict[str, Any]):
    """A message that records which of its values are read."""

    __slots__ = ("_read",)

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._read: set[str] = set()

    @property
    def _unread(self) -> list[str]:
        return [key for key in self.keys() if key not in self._read]

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Any:  # without it, dict(message) would read no item here
        return iter(self.keys())

    def items(self) -> Any:
        self._read.update(self.keys())
        return super().items()

    def values(self) -> Any:
        return [value for _, value in self.items()]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())


class _Generation(jinja2.ext.Extension):
    """Marks the answers: text between {% generation %} and {% endgeneration %}."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a plain set)

    def parse(self, parser: Any) -> Any:
        """Put marks around the block; variables set in the block stay in its scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = [_text(_START, line), *body, _text(_END, line)]
        return jinja2.nodes.With([], [], marked, lineno=line)


def _text(text: str, line: int) -> Any:
    data = jinja2.nodes.TemplateData(text, lineno=line)
    return jinja2.nodes.Output([data], lineno=line)


def _environment(date: datetime.datetime) -> Any:
    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals[_DATE] = date.strftime
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(template: str, date: str) -> tuple[Any, bool, list[str]]:
    """Return the compiled template, whether it marks answers, and its variables.

    The function `strftime_now` counts as a variable.
    """
    environment = _environment(datetime.datetime.fromisoformat(date))
    parsed = environment.parse(template)  # for a plain message about a syntax error
    compiled = environment.from_string(template)
    words = {word for _, kind, word in environment.lex(template) if kind == "name"}
    variables = jinja2.meta.find_undeclared_variables(parsed) | words & {_DATE}
    return compiled, "generation" in words, sorted(variables)


def _render(template: Any, variables: dict[str, Any]) -> dict[str, Any]:
    """Return the text without marks, [start, end] of each marked part, and [index, key]
    of each value of a message that was not read.
    """
    messages = [_Message(message) for message in variables["messages"]]
    parts, num_chars = [], 0
    for part in template.generate(**variables | {"messages": messages}):
        parts.append(part)
        num_chars += len(part)
        if num_chars > _MAX_CHARS:
            raise jinja2.TemplateError(
                f"one chat gives more than {_MAX_CHARS} characters"
            )
    text, spans = "", []
    for number, part in enumerate("".join(parts).split(_START)):
        if number == 0:
            text += part
            continue
        marked, *rest = part.split(_END)
        spans.append([len(text), len(text) + len(marked)])
        text += marked + "".join(rest)
    for found in _ADDRESS.finditer(text):
        if found[0] not in json.dumps(variables, ensure_ascii=False):
            printed = text[max(0, found.start() - 60) : found.end()].rpartition("<")[2]
            raise jinja2.TemplateError(
                f"it prints <{printed} instead of a value; call it, or list it"
            )
    unread = [(i, key) for i, message in enumerate(messages) for key in message._unread]
    return {"texts": text, "spans": spans, "unread": unread}


def _line_of(error: BaseException) -> int | None:
    """Return the template's line that raised an error; None if unknown."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    try:
        template, marks, variables = _compiled(request["template"], request["date"])
        done = [_render(template, variables) for variables in request["renders"]]
    except MemoryError:
        return {"error": f"it takes more than {_MEMORY_BYTES >> 20} MiB"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # a template can raise any error
        line = _line_of(error)
        where = "" if line is None else f"line {line}: "
        kind = "" if isinstance(error, jinja2.TemplateError) else type(error).__name__
        return {"error": f"{where}{': '.join(filter(None, (kind, str(error))))}"}
    lists = {k: [each[k] for each in done] for k in ("texts", "spans", "unread")}
    return lists | {"marks": marks, "variables": variables}


def main() -> None:
    """Answer requests until stdin ends."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = _MEMORY_BYTES if most < 0 else min(_MEMORY_BYTES, most)
    with contextlib.suppress(ValueError, OSError):  # the system lacks this limit
        resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may have ignored it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for limit_s in sys.stdin:
        # Time in which the process waits for a core does not count.
        signal.setitimer(signal.ITIMER_PROF, float(limit_s))
        print(json.dumps(answer(json.loads(sys.stdin.readline()))), flush=True)


if __name__ == "__main__":
    main()
