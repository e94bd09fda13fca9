"""Render a chat of a JSONL file as text, and find its answers.

An answer is the text that an assistant turn adds, up to and including the mark that
ends the turn. It is the text that a model must generate. `generation` blocks of a
template mark the answers. Without such blocks, the messages before an answer are
rendered, then the messages up to and including it. Both texts must be prefixes of the
whole chat's text; if the template changes earlier turns when more follow, the answers
cannot be located.

A text is tokenized in parts that end where generation begins, in training and in
generation. Otherwise the last tokens of a prompt, which end with the prompt, could be
tokens that training never saw: with GPT-2's pattern "[assistant] 24" has the token
" 24", but the prompt "[assistant] " ends with " ".

Source: `generation` blocks and their mask are those of transformers 5.23
(`apply_chat_template`, `return_assistant_tokens_mask`).
"""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from mjax.data import chat_records
from mjax.data.chat_records import Conversation
from mjax.data.chat_template import (
    ChatTemplate,
    Message,
    Rendered,
    as_templates_read,
    refuse_unread,
    render,
    render_several,
    with_reasoning,
)
from mjax.data.config import NEWEST
from mjax.data.formats import check_encodable
from mjax.data.tokenizers import Tokenizer

type Ids = Int64[np.ndarray, "_"]
type Spans = Int64[np.ndarray, "_ 2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRules:
    """How the chats of files are read and rendered."""

    template: ChatTemplate
    ignored_fields: tuple[str, ...] = ()
    """`DataConfig.ignored_fields`."""
    version: int = NEWEST
    """`DataConfig.version`."""

    @property
    def key(self) -> list[Any]:
        """JSON that is equal for equal rules; for version 1 the template alone."""
        key: list[Any] = [*dataclasses.astuple(self.template)]
        return key if self.version == 1 else [*key, self.version, *self.ignored_fields]


@dataclasses.dataclass(frozen=True)
class Chat:
    """The text of a chat."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """(start, end) of each answer with loss in the text, in characters."""
    starts: tuple[int, ...] = ()
    """Places in the text at which generation of an answer begins; see `encode_parts`.
    Version 1 has none."""
    unlike: str = ""
    """Why a prompt is not the beginning of the text; empty if all are."""


def read_chat(
    record: Mapping[str, Any],
    template: ChatTemplate,
    where: str,
    *,
    ignored: Sequence[str] = (),
    version: int = NEWEST,
) -> Chat:
    """Render one object of a JSONL file.

    Args:
      record: {"messages": [{"role", "content"}, ...]}; or "conversations" of {"from",
        "value"}; or "prompt" and "completion". More fields: `chat_records`.
      template: template of the tokenizer.
      where: file and line, for error messages.
      ignored: names of fields of records and messages that are not part of the chat.
      version: `DataConfig.version`.
    Raises:
      ValueError: the object is not a chat, has no answer or an empty answer, has a
        field that does not reach the text, or is refused by the template.
    """
    if version == 1:
        chat = chat_records.read_version_1(record, where)
    else:
        chat = chat_records.read(record, where, ignored=ignored)
    messages = chat.messages
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    learned = [place for place in places if place not in chat.untrained]
    if not places:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"{where} has no assistant turn, only {roles}, so it has no loss; leave it "
            'out, or name the role of the answers "assistant"'
        )
    if not learned:
        raise ValueError(
            f"{where} has no answer with a weight other than 0, so it has no loss; "
            "leave it out"
        )
    for place in learned:
        if _is_empty(messages[place]):
            raise ValueError(
                f"{where}: message {place + 1}, an assistant turn, is empty, so it "
                "would teach only the end of a turn; write the answer, or leave the "
                "chat out"
            )
    try:
        rendered = _rendered(template, chat, version)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    check_encodable(rendered.text, where)
    return rendered


def _is_empty(message: Message) -> bool:
    """Return whether a message has neither content nor tool calls."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return not said and not message.get("tool_calls")


def _rendered(template: ChatTemplate, chat: Conversation, version: int) -> Chat:
    """Render the whole chat, and find the answers.

    Raises:
      ValueError: the template refuses or leaves out a message, or the answers cannot be
        located.
    """
    messages: list[Message] = [*chat.messages]
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if version > 1:
        messages = [with_reasoning(message) for message in messages]
    [whole] = _render(template, [(messages, False)], chat.variables)
    if version > 1:
        refuse_unread(whole, chat.messages, chat.variables)
    if whole.marks_answers and version == 1:
        return Chat(whole.text, _marked(whole))
    asked = [(messages[:place], True) for place in places]
    if whole.marks_answers:
        return _with_prompts(
            whole, _render(template, asked, chat.variables), chat, places
        )
    asked += [(messages[: place + 1], False) for place in places]
    parts = _render(template, asked, chat.variables)
    answers = []
    for place, before, after in zip(
        places, parts[: len(places)], parts[len(places) :], strict=True
    ):
        _check_prefix(before, after, f"its message {place + 1}, an answer, is written")
        following = f"messages follow message {place + 1}"
        _check_prefix(after, whole, following)
        start, end = len(before.text), len(after.text)
        content = messages[place].get("content")
        blank = _num_blank(after.text[start:], content, version)
        if start + blank == end and version > 1:
            raise ValueError(
                f"the chat template writes nothing for message {place + 1}, an answer; "
                "give another template as --data.chat-template"
            )
        answers.append((start, end - blank))
    if version == 1:
        return Chat(whole.text, tuple(answers))
    starts = tuple(start for start, _ in answers)
    return Chat(whole.text, _learned(answers, starts, chat, places), starts)


def _marked(whole: Rendered) -> tuple[tuple[int, int], ...]:
    if not whole.answers:
        raise ValueError(
            "the generation blocks of the chat template mark no answer in this chat"
        )
    return whole.answers


def _learned(
    answers: Sequence[tuple[int, int]],
    starts: Sequence[int],
    chat: Conversation,
    places: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Return the answers with loss.

    Args:
      answers: all answers; one turn may have several.
      starts: places in the text at which the assistant turns begin.
      chat: the conversation.
      places: indices of the assistant turns.
    """
    if not chat.untrained & set(places):
        return tuple(answers)
    if len(starts) != len(places):
        raise ValueError(
            "the prompts of the chat template are not in the text of the chat, so "
            "answers without loss cannot be located; give another template as "
            "--data.chat-template"
        )
    turns = [bisect.bisect_left(starts, end) - 1 for _, end in answers]
    pairs = zip(answers, turns, strict=True)
    return tuple(a for a, turn in pairs if places[turn] not in chat.untrained)


def _with_prompts(
    whole: Rendered,
    prompts: Sequence[Rendered],
    chat: Conversation,
    places: Sequence[int],
) -> Chat:
    """Compare the answers that a template marks with its own prompts for them."""
    answers, starts, unlike = _marked(whole), [], ""
    for prompt in prompts:
        place = len(prompt.text)
        if not whole.text.startswith(prompt.text):
            unlike = unlike or f"the chat has not the prompt ..{prompt.text[-30:]!r}"
            continue
        starts.append(place)
        if not any(start <= place < end for start, end in answers):
            following = whole.text[place : place + 30]
            unlike = unlike or f"after a prompt, {following!r}.. is not learned"
    learned = _learned(answers, starts, chat, places)
    return Chat(whole.text, learned, tuple(starts), unlike)


def _render(
    template: ChatTemplate,
    chats: Sequence[tuple[Sequence[Message], bool]],
    variables: Mapping[str, Any],
) -> list[Rendered]:
    try:
        return render_several(template, chats, variables=variables)
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


def encode_parts(
    text: str, starts: Sequence[int], tokenizer: Tokenizer
) -> tuple[Ids, Spans, str]:
    """Tokenize a chat's text in parts that end where generation begins.

    A tokenizer that puts a space before each part (Metaspace) would change the text, so
    it gets the whole text.

    Args:
      text: the text.
      starts: ends of all parts but the last, in characters.
      tokenizer: tokenizer of the text.
    Returns:
      The ids, their spans in the text, and how the tokens of a prompt differ from those
      of the whole text; empty if they do not.
    """
    ids, spans = tokenizer.encode_spans(text)
    if not starts:
        return ids, spans, ""
    cuts = [0, *starts, len(text)]
    parts = [tokenizer.encode_spans(text[a:b]) for a, b in itertools.pairwise(cuts)]
    joined = np.concatenate([part for part, _ in parts])
    if np.array_equal(joined, ids):
        return ids, spans, ""
    if np.array_equal(tokenizer.text_bytes(joined), tokenizer.text_bytes(ids)):
        places = zip(parts, cuts, strict=False)
        spans = np.concatenate([spans + start for (_, spans), start in places])
        return joined, spans, _difference(joined, ids, tokenizer)
    for start in starts:
        prompt = tokenizer.encode_special(text[:start])
        if not np.array_equal(prompt, ids[: len(prompt)]):
            return ids, spans, _difference(prompt, ids, tokenizer)
    return ids, spans, ""


def _difference(prompt: Ids, whole: Ids, tokenizer: Tokenizer) -> str:
    """Describe the first difference of a prompt and the whole text."""
    size = min(len(prompt), len(whole))
    place = int(np.argmin(np.append(prompt[:size] == whole[:size], False)))

    def shown(ids: Ids) -> list[str]:
        near = [ids[i : i + 1] for i in range(max(0, place - 2), place + 1)]
        texts = [
            tokenizer.text_bytes(i).tobytes().decode(errors="replace") for i in near
        ]
        return [
            text or tokenizer.decode(i) for text, i in zip(texts, near, strict=True)
        ]

    return f"the prompt has the tokens {shown(prompt)}, the whole text {shown(whole)}"


def prompt_parts(
    messages: Sequence[Message],
    template: ChatTemplate,
    *,
    add_generation_prompt: bool = True,
) -> tuple[str, list[int]]:
    """Return the text of messages, and its places at which an answer begins.

    They are the places at which `encode_parts` cuts the chat in training.

    Args:
      messages: as in `chat_template.render`.
      template: template of the tokenizer.
      add_generation_prompt: whether to end with the text that begins an answer.
    Raises:
      ValueError: as in `chat_template.render`.
    """
    text = render(template, messages, add_generation_prompt=add_generation_prompt)
    messages = as_templates_read(messages)
    places = [i for i, m in enumerate(messages) if i and m.get("role") == "assistant"]
    try:
        earlier = render_several(template, [(messages[:i], True) for i in places])
    except ValueError:  # a template can refuse to prompt for an answer that is given
        earlier = []
    starts = [len(part.text) for part in earlier if text.startswith(part.text)]
    return text, [*starts, len(text)] if add_generation_prompt else starts


def encode_prompt(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> Ids:
    """Return the tokens after which a model generates the next answer.

    They are the tokens that `encode_chat` gives a chat up to this answer.

    Raises:
      ValueError: as in `chat_template.render`.
    """
    return encode_parts(*prompt_parts(messages, template), tokenizer)[0]


def encode_chat(
    chat: Chat, tokenizer: Tokenizer
) -> tuple[Ids, Bool[np.ndarray, "_"], str]:
    """Tokenize a chat.

    A token that is partly inside an answer belongs to the answer, as in transformers.

    Returns:
      The ids, whether each belongs to an answer, and how prompts differ from the chat;
      empty if they do not.
    """
    ids, spans, unlike = encode_parts(chat.text, chat.starts, tokenizer)
    is_answer = np.zeros(len(ids), bool)
    for start, end in chat.answers:
        is_answer |= (spans[:, 0] < end) & (spans[:, 1] > start)
    return ids, is_answer, chat.unlike or unlike
