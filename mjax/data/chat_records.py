"""Read records of chats in the formats of several trainers.

Input: an object of a JSONL file, or a row of parquet. Output: messages and variables
for a chat template, and the answers without loss. Each field is used, or refused with
its place; absent, null and empty are the same. Whether the template reads what it gets
is checked after it is rendered (`chat_template.refuse_unread`).

Source: TRL 0.24 (`messages`, `prompt` and `completion`, `tools`,
`chat_template_kwargs`), OpenAI's fine-tuning format (`weight`), axolotl (`train`), and
ShareGPT as LLaMA-Factory has it (`conversations`, `system`, `function_call`,
`observation`).
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from mjax import checked_json
from mjax.data.chat_template import IGNORED, RESERVED, plain_content

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""Role in "from" (ShareGPT) -> role in "messages"."""
_NEW_ROLES = ("chatgpt", "observation")
"""Roles that version 1 does not convert."""
_CALL = "function_call"
"""Role in "from" of an answer that calls a tool."""
_VARIABLES = ("tools", "documents")
_KWARGS = "chat_template_kwargs"
_KNOWN = ("messages", "conversations", "prompt", "completion", "system", _KWARGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and everything else that a template renders."""

    messages: list[dict[str, Any]]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of the template besides the messages, such as tools."""
    untrained: frozenset[int] = frozenset()
    """Indices of messages without loss; all but the assistant's have none anyway."""


def read(
    record: Mapping[str, Any], where: str, *, ignored: Collection[str] = ()
) -> Conversation:
    """Convert a record.

    Args:
      record: as in `chats.read_chat`.
      where: file and line, for error messages.
      ignored: names of fields of records and messages that are not part of the chat.
    Raises:
      ValueError: the record is not a chat, or has a field that is not read.
    """
    fields = {k: v for k, v in record.items() if k not in ignored}
    turns, num_prompt = _turns(fields, where)
    if system := fields.pop("system", None):
        _check_system(system, turns, where)
        turns = [{"role": "system", "content": system}, *turns]
        num_prompt += num_prompt > 0
    messages, untrained = [], set(range(num_prompt))
    for number, turn in enumerate(turns):
        message, is_trained = _message(turn, f"{where}: message {number + 1}", ignored)
        messages.append(message)
        if not is_trained:
            untrained.add(number)
    variables = _variables(fields, where)
    if unread := [name for name, value in fields.items() if not is_empty(value)]:
        names = " ".join(sorted(unread))
        near = difflib.get_close_matches(unread[0], [*_KNOWN, *_VARIABLES], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"{where} has fields that are not part of a chat: {names}{hint}; remove "
            f"them, or leave them out with {IGNORED} {names}"
        )
    return Conversation(
        messages=messages, variables=variables, untrained=frozenset(untrained)
    )


def read_version_1(record: Mapping[str, Any], where: str) -> Conversation:
    """Convert a record as `DataConfig.version` 1 does, which reads no other fields."""
    fields = dict(record)
    if "messages" in record:
        fields = {"messages": record["messages"]}
    elif "conversations" in record:
        entries = record["conversations"]
        if not isinstance(entries, list) or not all(
            isinstance(e, dict) and isinstance(e.get("from"), str) for e in entries
        ):
            raise ValueError(
                f'{where}: "conversations" must be a list of objects with "from" and '
                '"value"'
            )
        roles = {k: v for k, v in _ROLES.items() if k not in _NEW_ROLES}
        pairs = [(e["from"], e.get("value")) for e in entries]
        turns = [{"role": roles.get(role, role), "content": c} for role, c in pairs]
        fields = {"messages": turns}
    turns, _ = _turns(fields, where)
    for number, turn in enumerate(turns, start=1):
        _check_message(turn, f"{where}: message {number}")
    return Conversation(messages=turns)


def is_empty(value: Any) -> bool:
    """Return whether the value of a field holds nothing."""
    return value is None or value in ("", [], {})


def without_nulls(value: Any) -> Any:
    """Return a value of parquet without null fields, which its rows have by schema."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _turns(fields: dict[str, Any], where: str) -> tuple[list[Any], int]:
    """Remove the turns from the fields; return them, and how many are a prompt."""
    forms = [name for name in _KNOWN[:2] if fields.get(name) is not None]
    if fields.get("prompt") is not None and fields.get("completion") is not None:
        forms.append("prompt")
    if len(forms) > 1:
        raise ValueError(
            f"{where} has a chat in {forms[0]!r} and another in {forms[1]!r}; remove "
            f"one, or leave it out with {IGNORED} {forms[1]}"
        )
    if not forms:
        raise ValueError(
            f'{where} has no field "messages", only {sorted(fields)}; --data.format '
            'chat reads {"messages": [{"role", "content"}, ...]}, "conversations", or '
            '"prompt" and "completion"'
        )
    turns, num_prompt = fields.pop(forms[0]), 0
    if forms[0] == "prompt":
        answer = fields.pop("completion")
        prompt = _as_turns(turns, "user")
        turns, num_prompt = prompt + _as_turns(answer, "assistant"), len(prompt)
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f'{where}: "{forms[0]}" must be a list of at least one message'
        )
    return turns, num_prompt


def _as_turns(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _check_system(system: Any, turns: list[Any], where: str) -> None:
    if not isinstance(system, str):
        raise ValueError(f"{where}: system must be a text, got {str(system)[:80]}")
    first = turns[0] if isinstance(turns[0], dict) else {}
    if "system" in (first.get("role"), first.get("from")):
        raise ValueError(
            f"{where} has the field system and a system message; remove one, or leave "
            f"the field out with {IGNORED} system"
        )


def _message(
    turn: Any, at: str, ignored: Collection[str]
) -> tuple[dict[str, Any], bool]:
    """Convert a turn; return the message, and whether an answer in it is learned."""
    if not isinstance(turn, dict):
        raise _not_a_message(turn, at)
    message = {k: v for k, v in turn.items() if k not in ignored and v is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        role, content = message.pop("from"), message.pop("value", None)
        if role == _CALL:
            calls = {"content": "", "tool_calls": _calls(content, at)}
            message = {"role": "assistant", **calls, **message}
        else:
            content = {"content": content}
            message = {"role": _ROLES.get(role, role), **content, **message}
    try:
        message = dict(plain_content(message))
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from None
    _check_message(message, at)
    return message, _pop_is_trained(message, at)


def _check_message(message: Any, at: str) -> None:
    is_object = isinstance(message, dict) and isinstance(message.get("role"), str)
    content = message.get("content") if is_object else 0
    can_be = isinstance(content, str | list) or (
        content is None and is_object and message.get("tool_calls")
    )
    if not is_object or not can_be:
        raise _not_a_message(message, at)


def _not_a_message(value: Any, at: str) -> ValueError:
    return ValueError(
        f"{at} must be an object with texts as role and content, got {str(value)[:80]}"
    )


def _pop_is_trained(message: dict[str, Any], at: str) -> bool:
    """Remove the marks for training from a message; return what they say."""
    marks = {k: message.pop(k) for k in ("weight", "train") if k in message}
    for name, value in marks.items():
        if value not in (0, 1):
            raise ValueError(
                f"{at}: {name} must be 0 or 1, or false or true, got {str(value)[:40]}"
            )
    if len({bool(value) for value in marks.values()}) > 1:
        raise ValueError(f"{at}: weight and train contradict each other; remove one")
    is_trained = all(marks.values())
    if marks and is_trained and message["role"] != "assistant":
        raise ValueError(
            f"{at} is of the role {message['role']!r} and marked for training by "
            f"{next(iter(marks))!r}, but only answers of the assistant are learned; "
            f"remove the mark, or leave all out with {IGNORED} {next(iter(marks))}"
        )
    return is_trained


def _calls(value: Any, at: str) -> list[dict[str, Any]]:
    """Convert the JSON text of one or several calls of tools."""
    try:
        found = checked_json.read(str(value), dict[str, Any] | list[dict[str, Any]])
    except ValueError as error:
        raise ValueError(
            f"{at}: a {_CALL} must be JSON with name and arguments: {error}"
        ) from None
    calls = found if isinstance(found, list) else [found]
    if not calls or any(set(call) != {"name", "arguments"} for call in calls):
        raise ValueError(
            f"{at}: a {_CALL} must have name and arguments, got {str(value)[:80]}"
        )
    return [{"type": "function", "function": call} for call in calls]


def _variables(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Remove the variables of the template from the fields, and return them."""
    kinds = dict.fromkeys(_VARIABLES, list[dict[str, Any]]) | {_KWARGS: dict[str, Any]}
    found = {}
    for name, kind in kinds.items():
        value = fields.pop(name, None)
        try:
            if isinstance(value, str) and value.strip():
                value = checked_json.read(value, kind)
            if not is_empty(value):
                found[name] = checked_json.check(value, kind, name)
        except ValueError as error:
            raise ValueError(f"{where}: {name}: {error}") from None
    given = found.pop(_KWARGS, {})
    if reserved := sorted(RESERVED & given.keys()):
        raise ValueError(
            f"{where}: {_KWARGS} sets {' '.join(reserved)}, which the chat itself "
            "sets; remove it there"
        )
    return found | {key: value for key, value in given.items() if value is not None}
