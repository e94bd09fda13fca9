"""Render a chat of a JSONL file as text, and find its answers.

An answer is the text that an assistant turn adds, up to and including the mark that
ends the turn. It is the text that a model must generate. `generation` blocks of a
template mark the answers. Without such blocks, the messages before an answer are
rendered, then the messages up to and including it. Both texts must be prefixes of the
whole chat's text; if the template changes earlier turns when more follow, the answers
cannot be located.

Source: `generation` blocks and their mask are those of transformers 5.23
(`apply_chat_template`, `return_assistant_tokens_mask`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from mjax.data.chat_template import ChatTemplate, Message, Rendered, render_several
from mjax.data.config import NEWEST
from mjax.data.tokenizers import Tokenizer

TRAINING_DATE = "2024-07-26"
"""Date that `strftime_now` returns to a template: with the real date, the text would
change from day to day. This is the default date of Llama 3's templates."""

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Role in "conversations" (ShareGPT) -> role in "messages"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRules:
    """How the chats of files are read and rendered."""

    template: ChatTemplate
    version: int = NEWEST
    """`DataConfig.version`."""

    @property
    def key(self) -> list[Any]:
        """JSON that is equal for equal rules; for version 1 the template alone."""
        key: list[Any] = [*dataclasses.astuple(self.template)]
        return key if self.version == 1 else [*key, self.version]


@dataclasses.dataclass(frozen=True)
class Chat:
    """The text of a chat."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """(start, end) of each answer in the text, in characters."""


def read_chat(
    record: Mapping[str, Any],
    template: ChatTemplate,
    where: str,
    *,
    version: int = NEWEST,
) -> Chat:
    """Render one object of a JSONL file.

    Args:
      record: {"messages": [{"role", "content"}, ...]}; or "conversations" of {"from",
        "value"}; or "prompt" and "completion".
      template: template of the tokenizer.
      where: file and line, for error messages.
      version: `DataConfig.version`.
    Raises:
      ValueError: the object is not a chat, has no answer or an empty answer, or is
        refused by the template.
    """
    messages = messages_of(record, where)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"{where} has no assistant turn, only {roles}, so it has no loss; leave it "
            'out, or name the role of the answers "assistant"'
        )
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and _is_empty(message):
            raise ValueError(
                f"{where}: message {number}, an assistant turn, is empty, so it would "
                "teach only the end of a turn; write the answer, or leave the chat out"
            )
    try:
        return _rendered(template, messages, version)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_empty(message: Message) -> bool:
    """Return whether a message has neither content nor tool calls."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return not said and not message.get("tool_calls")


def messages_of(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of one object, converted to the format of "messages".

    Raises:
      ValueError: the object has no messages, or an entry is not a message.
    """
    if "messages" in record:
        messages = record["messages"]
    elif "conversations" in record:
        messages = _from_conversations(record["conversations"], where)
    elif "prompt" in record and "completion" in record:
        messages = _from_prompt(record["prompt"], record["completion"])
    else:
        raise ValueError(
            f'{where} has no field "messages", only {sorted(record)}; --data.format '
            'chat reads {"messages": [{"role", "content"}, ...]}, "conversations", or '
            '"prompt" and "completion"'
        )
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where}: "messages" must be a list of at least one message')
    for number, message in enumerate(messages, start=1):
        is_object = isinstance(message, dict) and isinstance(message.get("role"), str)
        content = message.get("content") if is_object else 0
        can_be = isinstance(content, str | list) or (
            content is None and is_object and message.get("tool_calls")
        )
        if not is_object or not can_be:
            raise ValueError(
                f"{where}: message {number} must be an object with texts as role and "
                f"content, got {str(message)[:80]}"
            )
    return messages


def _from_conversations(turns: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not all(
        isinstance(t, dict) and isinstance(t.get("from"), str) for t in turns
    ):
        raise ValueError(
            f'{where}: "conversations" must be a list of objects with "from" and '
            '"value"'
        )
    return [
        {"role": _ROLES.get(t["from"], t["from"]), "content": t.get("value")}
        for t in turns
    ]


def _from_prompt(prompt: Any, completion: Any) -> Any:
    """Join a prompt and a completion, each a text or a list of messages."""
    asked = [{"role": "user", "content": prompt}]
    answered = [{"role": "assistant", "content": completion}]
    return [
        *(prompt if isinstance(prompt, list) else asked),
        *(completion if isinstance(completion, list) else answered),
    ]


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], version: int
) -> Chat:
    """Render the whole chat, and find the answers.

    Raises:
      ValueError: the template refuses a message, or the answers cannot be located.
    """
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    asked = [(messages, False)]
    for place in places:
        asked += [(messages[:place], True), (messages[: place + 1], False)]
    whole = _render(template, asked[:1])[0]
    if whole.marks_answers:
        if not whole.answers:
            raise ValueError(
                "the generation blocks of the chat template mark no answer in this chat"
            )
        return Chat(whole.text, whole.answers)
    parts = _render(template, asked[1:])
    answers = []
    for number, place in enumerate(places):
        before, after = parts[2 * number : 2 * number + 2]
        _check_prefix(before, after, f"its message {place + 1}, an answer, is written")
        following = f"messages follow message {place + 1}"
        _check_prefix(after, whole, following)
        start, end = len(before.text), len(after.text)
        content = messages[place].get("content")
        blank = _num_blank(after.text[start:], content, version)
        answers.append((start, end - blank))
    return Chat(whole.text, tuple(answers))


def _render(
    template: ChatTemplate, chats: Sequence[tuple[Sequence[Message], bool]]
) -> list[Rendered]:
    try:
        return render_several(template, chats, now=TRAINING_DATE)
    except ValueError as error:
        raise ValueError(
            f"{error}; fix the chat, or give another template as --data.chat-template"
        ) from None


def _check_prefix(first: Rendered, second: Rendered, once: str) -> None:
    if second.text.startswith(first.text):
        return
    pairs = zip(first.text, second.text, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(second.text))
    raise ValueError(
        f"the chat template changes earlier text once {once} (from "
        f"character {same}: {first.text[same : same + 30]!r} becomes "
        f"{second.text[same : same + 30]!r}), so the answer cannot be "
        "located; give a template with generation blocks as --data.chat-template"
    )


def _num_blank(added: str, content: Any, version: int) -> int:
    """Count the blanks after the mark that ends a turn; a model need not write them.

    If only blanks follow the content, the blanks are the mark, and the result is 0.
    Version 1 takes a mark that ends like the content for the content.
    """
    stripped = added.rstrip()
    text = content.rstrip() if isinstance(content, str) else ""
    after = added[added.find(text) + len(text) :] if text in added else added
    if version == 1:
        after = added[len(stripped) :] if text and stripped.endswith(text) else added
    return len(added) - len(stripped) if after.strip() else 0


def encode_chat(
    chat: Chat, tokenizer: Tokenizer
) -> tuple[Int64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
    """Return the token ids of a chat, and whether each belongs to an answer.

    A token that is partly inside an answer belongs to the answer, as in transformers.
    """
    ids, spans = tokenizer.encode_spans(chat.text)
    is_answer = np.zeros(len(ids), bool)
    for start, end in chat.answers:
        is_answer |= (spans[:, 0] < end) & (spans[:, 1] > start)
    return ids, is_answer
