"""Convert chat messages to tokens with the chat template of a model.

Input: an opened model. Output: a function from messages to token ids, used by the
server and by the chat in the terminal; the tokens are those that training has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mjax.data import chat_template
from mjax.data.chats import encode_prompt
from mjax.generate.opened import Opened

type Message = Mapping[str, Any]
"""A dict with "role" and "content"."""
type ChatEncoder = Callable[[Sequence[Message]], Sequence[int]]
"""Maps messages to the token ids of the prompt for the next answer. Raises ValueError
if the template refuses the messages."""


def encoder(opened: Opened) -> ChatEncoder | None:
    """Return a function from messages to tokens; None if the model has no template.

    Raises:
      ValueError: the template is broken.
    """
    template = opened.chat_template
    if template is None:
        return None
    chat_template.check(template.text)

    def encode(messages: Sequence[Message]) -> Sequence[int]:
        return encode_prompt(messages, template, opened.tokenizer).tolist()

    return encode
