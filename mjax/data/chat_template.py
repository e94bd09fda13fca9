"""Render messages as text with a chat template.

A template is Jinja code, as in the `tokenizer_config.json` of a Hugging Face folder. It
is rendered in another process (`template_worker`) with bounded CPU time and memory. So
an endless template ends in an error, and a template cannot affect this process.

Source: templates have the same environment as in transformers 5.23; see the worker.
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mjax import checked_json

CPU_LIMIT_S = 10.0
"""Limit of a request to the worker in seconds of CPU time, which do not pass while the
worker waits for a core. Rendering takes under 1 ms."""
DATE = "2024-07-26"
"""Date that `strftime_now` returns to a template, in training, generation and
evaluation alike. With the current date, as in transformers, a text would change from
day to day, a run could not be resumed, and a model would be asked with a date that it
was never trained with. This is the default date of Llama 3's templates."""
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_log = logging.getLogger(__name__)
_WORKER = pathlib.Path(__file__).with_name("template_worker.py")

IGNORED = "--data.ignored-fields"
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt"}
    | {"bos_token", "eos_token"}
)
"""Variables of a template that a conversation and a tokenizer set."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning before an answer, the one that most templates read first."""

Message = Mapping[str, Any]
"""Mapping with "role", "content", and other fields that a template reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, and the special tokens that it may use."""

    text: str
    """Source of the template, in Jinja."""
    bos_token: str = ""
    eos_token: str = ""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Result of rendering a template."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Start and end of each {% generation %} block in the text, in characters."""
    marks_answers: bool
    """Whether the template contains generation blocks."""
    unread: tuple[tuple[int, str], ...]
    """Index of a message and name of a field, for fields that were not read."""
    variables: frozenset[str]
    """Names of the variables that the template reads."""


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text of messages, as `apply_chat_template` of transformers does.

    Args:
      template: template, with its special tokens.
      messages: messages, each with "role" and "content": a text, or a list of texts as
        in `plain_content`.
      add_generation_prompt: whether to end with the text that begins an answer.
    Raises:
      ValueError: the template or a message is refused; the error names the line; or the
        template leaves a part of a message out.
    """
    readable = as_templates_read(messages)
    rendered = render_several(template, [(readable, add_generation_prompt)])[0]
    refuse_unread(rendered, [plain_content(message) for message in messages])
    return rendered.text


def as_templates_read(messages: Sequence[Message]) -> list[Message]:
    """Return messages with plain content, and reasoning under the names of templates.

    Raises:
      ValueError: as `plain_content`.
    """
    return [with_reasoning(plain_content(message)) for message in messages]


def with_reasoning(message: Message) -> Message:
    """Return a message whose reasoning has the names that templates read.

    Most templates read "reasoning_content", those of gpt-oss "thinking". A name that
    the message has keeps its value, except that the first of `REASONING` wins.

    Source: `_alias_reasoning_fields` of transformers 5.23.
    """
    given = [message[name] for name in REASONING if message.get(name) is not None]
    if not given:
        return message
    return {"thinking": given[0], **message, REASONING[0]: given[0]}


def plain_content(message: Message) -> Message:
    """Return a message whose content, if it is a list of texts, is one text.

    Most templates take only texts. They would print a list as Python does.

    Args:
      message: content may be a list of {"type": "text", "text": TEXT}.
    Raises:
      ValueError: the list has another element.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for index, part in enumerate(content):
        given = part if isinstance(part, dict) else {}
        given = {key: value for key, value in given.items() if value is not None}
        text = given.pop("text", None)
        if given != {"type": "text"} or not isinstance(text, str):
            raise ValueError(
                f'content[{index}] must be {{"type": "text", "text": TEXT}}, got '
                f"{str(part)[:80]}; only text can be rendered"
            )
        texts.append(text)
    return {**message, "content": "".join(texts)}


def refuse_unread(
    rendered: Rendered,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
) -> None:
    """Refuse what was given to a template that does not read it.

    Args:
      rendered: result of the template.
      messages: messages that were rendered, before `with_reasoning`.
      variables: other variables that were given.
    Raises:
      ValueError: a message, a field of one or a variable did not reach the text.
    """
    unread_fields = set(rendered.unread)
    for index, key in rendered.unread:
        message = messages[index]
        role, value = message.get("role"), message.get(key)
        if key == "role" or value is None or value in ("", [], {}):
            continue
        copies = with_reasoning(message) if key in REASONING else {}
        if any(
            copies.get(name) == value and (index, name) not in unread_fields
            for name in REASONING
        ):
            continue
        if key == "content":
            raise ValueError(
                f"the chat template leaves out the content of message {index + 1}, of "
                f"the role {role!r}; remove it, or give another template"
            )
        raise ValueError(
            f"the chat template does not read {key!r} of message {index + 1}, of the "
            f"role {role!r}; remove it, give another template, or, in training, leave "
            f"it out with {IGNORED} {key}"
        )
    if unread := sorted((variables or {}).keys() - rendered.variables):
        raise ValueError(
            f"the chat template does not read {', '.join(unread)}; remove the field, "
            f"give another template, or leave the field out with {IGNORED}"
        )


def render_several(
    template: ChatTemplate,
    chats: Sequence[tuple[Sequence[Message], bool]],
    *,
    variables: Mapping[str, Any] | None = None,
) -> list[Rendered]:
    """Render several lists of messages in one request.

    Args:
      template: template, with its special tokens.
      chats: pairs of messages and add_generation_prompt, as in `render`.
      variables: other variables of the template, such as tools (JSON descriptions of
        functions that the model may call).
    Raises:
      ValueError: as in `render`.
    """
    shared = {
        "bos_token": template.bos_token,
        "eos_token": template.eos_token,
        "tools": None,
        "documents": None,
        **(variables or {}),
    }
    renders = [
        shared | {"messages": list(messages), "add_generation_prompt": prompt}
        for messages, prompt in chats
    ]
    request = {"template": template.text, "renders": renders, "date": DATE}
    try:
        line = json.dumps(request)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a message of the chat is not JSON: {error}") from None
    reply = _WORKER_PROCESS.ask(line)
    if "error" in reply:
        raise ValueError(f"the chat template refuses: {reply['error']}")
    marks, names = reply["marks"], frozenset(reply["variables"])
    return [
        Rendered(text, _pairs(spans), marks, _pairs(unread), names)
        for text, spans, unread in zip(
            reply["texts"], reply["spans"], reply["unread"], strict=True
        )
    ]


def _pairs(lists: Sequence[Sequence[Any]]) -> tuple[tuple[Any, Any], ...]:
    return tuple((first, second) for first, second in lists)


def check(template: str) -> None:
    """Refuse a template with a syntax error; log if it has a date.

    Raises:
      ValueError: the syntax is wrong; the error names the line.
    """
    request = {"template": template, "renders": [], "date": DATE}
    reply = _WORKER_PROCESS.ask(json.dumps(request))
    if "error" in reply:
        raise ValueError(f"the chat template is broken: {reply['error']}")
    if "strftime_now" in reply["variables"]:
        _log.warning(
            "the chat template reads the date: it is always %s, in training, "
            "generation and evaluation; write another date into a system message",
            DATE,
        )


def read_beside(folder: pathlib.Path) -> ChatTemplate | None:
    """Read the template in the folder of a tokenizer; None if there is none.

    `chat_template.jinja` takes precedence over the entry in `tokenizer_config.json`.
    That entry is a string, or a list of named templates, of which "default" is used.

    Raises:
      ValueError: a file cannot be read.
    """
    config = _config(folder / CONFIG_FILE)
    names = {key: _token_name(config.get(key)) for key in ("bos_token", "eos_token")}
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return ChatTemplate(text=read_file(path), **names)
    text = config.get("chat_template")
    if isinstance(text, list):
        entries = [entry for entry in text if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        text = named.get("default")
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(
            f"{folder / CONFIG_FILE}: chat_template must be a text, or a list of named "
            f"ones with one called default, got {type(text).__name__}"
        )
    return ChatTemplate(text=text, **names)


def read_file(path: pathlib.Path) -> str:
    """Read the text of a template.

    Raises:
      ValueError: the file cannot be read.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template {path} cannot be read: {error}") from None


def _config(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return checked_json.read(path.read_bytes(), dict[str, Any])
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _token_name(token: Any) -> str:
    """Return the name of a token, given as a string or as an object with "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


class _Worker:
    """The process that renders; started by the first request, and after an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0

    def ask(self, request: str) -> dict[str, Any]:
        """Send a request and return the answer; it may take `CPU_LIMIT_S` of CPU time.

        Raises:
          ValueError: jinja2 is not installed.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            reply = ""
            try:
                process.stdin.write(f"{CPU_LIMIT_S}\n{request}\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                pass  # the worker has exited; reported below
            finally:
                if not reply.endswith("\n"):
                    self._end()
        if reply.endswith("\n"):
            return json.loads(reply)
        if process.returncode == -signal.SIGPROF:
            return {"error": f"rendering takes more than {CPU_LIMIT_S:g} s of CPU time"}
        return {"error": "the process that renders it ended"}

    def close(self) -> None:
        """End the process if it runs."""
        with self._lock:
            self._end()

    def _running(self) -> "subprocess.Popen[str]":
        # A forked process inherits these pipes, but needs a worker of its own.
        if self._process is not None and self._pid == os.getpid():
            return self._process
        if importlib.util.find_spec("jinja2") is None:
            raise ValueError("chat templates need jinja2; pip install 'mjax[data]'")
        self._pid = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # only the asking process handles Ctrl-C
        )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._pid != os.getpid():
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


_WORKER_PROCESS = _Worker()
atexit.register(_WORKER_PROCESS.close)
