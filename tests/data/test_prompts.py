"""What a model continues of a held-out sample, and the tokens that end an answer."""

import numpy as np
import pytest

from mjax.data import prompts
from mjax.data.chat_samples import ANSWER, END, ChatSamples, chat_starts, group_chats
from mjax.data.documents import DocumentSamples, index_documents
from mjax.data.samples import PackedSamples
from mjax.data.tokenizers import BytesTokenizer

TOKENIZER = BytesTokenizer()


def chats(*parts: str, isolate: bool = True) -> ChatSamples:
    """Return samples of chats whose answers are the parts with odd numbers."""
    ids, flags = [], []
    for number, part in enumerate(parts):
        part_ids = TOKENIZER.encode_special(part)
        ids.append(part_ids)
        flags.append(np.full(len(part_ids), ANSWER * (number % 2), np.uint8))
        if number % 2:
            flags[-1][-1] |= END
    tokens, marks = np.concatenate(ids).astype(np.uint16), np.concatenate(flags)
    starts = chat_starts(marks)
    groups = group_chats(starts, 64, packed=True, skip_longer=False)
    return ChatSamples(tokens, marks, starts, groups, 64, TOKENIZER.eos_id, isolate)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_chat_is_prompted_up_to_the_header_of_its_first_answer(isolate):
    samples = chats(
        *("[user] 7 + 1<|endoftext|>\n[assistant] ", "8<|endoftext|>"),
        *("[user] 1 + 1<|endoftext|>\n[assistant] ", "2<|endoftext|>"),
        isolate=isolate,
    )
    prompt, ends = prompts.chat_prompt(samples[0], TOKENIZER)
    assert TOKENIZER.decode(prompt) == "[user] 7 + 1<|endoftext|>\n[assistant] "
    assert ends == {TOKENIZER.eos_id}


def test_the_special_token_that_ends_the_answers_ends_the_sample_too():
    class Tokenizer(BytesTokenizer):
        """Bytes, of which one is the special token of the end of a turn."""

        def __init__(self) -> None:
            super().__init__()
            self.token_num_bytes[ord("#")] = 0

    samples = chats("[user] 7 + 1#[assistant] ", "8#")
    assert prompts.chat_prompt(samples[0], Tokenizer())[1] == {
        ord("#"),
        TOKENIZER.eos_id,
    }
    # An ordinary token at the end of an answer may also be in the middle of one.
    assert prompts.chat_prompt(samples[0], TOKENIZER)[1] == {TOKENIZER.eos_id}


def test_a_text_is_prompted_by_at_most_its_first_half_without_padding():
    text = TOKENIZER.encode("abcdefgh" * 40).astype(np.uint16)
    long = PackedSamples(text, 256, TOKENIZER.eos_id, isolate_documents=True)
    assert TOKENIZER.decode(prompts.text_prompt(long[0])) == "abcdefgh" * 8
    ids = np.append(text[:20], TOKENIZER.eos_id).astype(np.uint16)
    short = DocumentSamples(ids, index_documents(ids, 256, 64), 64, 256)
    assert TOKENIZER.decode(prompts.text_prompt(short[0])) == "abcdefghab"
