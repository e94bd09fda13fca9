"""Convert chat messages to tokens with the chat template of a model.

Input: an opened model. Output: a function from messages to token ids, used by the
server and by the chat in the terminal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mjax.data import chat_template
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
        text = chat_template.render(template, messages, add_generation_prompt=True)
        return opened.tokenizer.encode_special(text).tolist()

    return encode
