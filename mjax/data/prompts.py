"""Choose the part of a held-out sample that a model continues, to show what it learned.

Input: one sample. Output: token ids, and for chats the tokens that end an answer.
"""

from collections.abc import Mapping, Set

import numpy as np
from jaxtyping import Int32

from mjax.data.samples import NO_TARGET
from mjax.data.tokenizers import Tokenizer

_MAX_TOKENS = 64
"""Maximum number of tokens of a prompt from a text. It is a line or two if tokens are
bytes."""


def text_prompt(sample: Mapping[str, Int32[np.ndarray, "T"]]) -> Int32[np.ndarray, "n"]:
    """Return the beginning of a text: at most half of it, without padding.

    Args:
      sample: tokens and targets of a sample.
    """
    size = int(np.flatnonzero(sample["targets"] != NO_TARGET).max(initial=0)) + 1
    return sample["tokens"][: max(1, min(_MAX_TOKENS, size // 2))]


def chat_prompt(
    sample: Mapping[str, Int32[np.ndarray, "T"]], tokenizer: Tokenizer
) -> tuple[Int32[np.ndarray, "n"], Set[int]]:
    """Return the beginning of a chat, and the tokens that end an answer.

    Args:
      sample: tokens, targets and positions of a sample of `ChatSamples`.
      tokenizer: tokenizer of the samples.
    Returns:
      prompt: the first chat up to its first answer, including the header of the
        assistant's turn if the template has a header.
      end_ids: the token that ends a document, and the last token of this answer if it
        is a special token.
    """
    is_target = sample["targets"] != NO_TARGET
    last = int(np.argmax(is_target))  # the token before the answer
    num_answer = int(np.argmin(is_target[last:]))
    start = last - int(sample["positions"][last])
    end_ids = {tokenizer.eos_id}
    final = int(sample["targets"][last + num_answer - 1])
    if num_answer and not tokenizer.token_num_bytes[final]:
        end_ids.add(final)
    return sample["tokens"][start : last + 1], end_ids
