"""The `bytes` tokenizer as a tokenizer.json that other libraries load.

Input: the name of the token that ends a document. Output: the text of a tokenizer.json
for a byte-level BPE without merges: the id of a byte is its value, and id 256 ends a
document. Writing it needs no library.

Source: GPT-2's table of characters that represent bytes (`bytes_to_unicode` in
github.com/openai/gpt-2, src/encoder.py), which the `tokenizers` library calls
ByteLevel; the fields are those of that library's tokenizer.json.
"""

import functools
import json
from typing import Any

_NUM_BYTES = 256
# The bytes that GPT-2's table represents by their own character.
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}


@functools.cache
def spec_json(eos_token: str, *, has_start: bool = False) -> str:
    """Return the text of tokenizer.json.

    mjax recognises a folder by this text, so it must not change between versions.

    Args:
      eos_token: name of token 256, which ends a document.
      has_start: whether this token is also put before a text.
    """
    vocab = {char: byte for byte, char in enumerate(characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": _NUM_BYTES,
                "content": eos_token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"trim_offsets": False},
        "post_processor": start_before(eos_token, _NUM_BYTES) if has_start else None,
        "decoder": byte_level | {"trim_offsets": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab | {eos_token: _NUM_BYTES},
            "merges": [],
        },
    }
    return json.dumps(spec, indent=1) + "\n"


def start_before(token: str, index: int) -> dict[str, Any]:
    """Return the post-processor of a tokenizer.json that puts a token before a text."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": n, "type_id": 0}} for n in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, start, second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def characters() -> list[str]:
    """Return a list whose element i is the character that represents byte i.

    Printable bytes are represented by themselves, the other bytes by the characters
    from 256 on, in order.
    """
    others = [byte for byte in range(_NUM_BYTES) if byte not in _PRINTABLE]
    shifted = {byte: chr(_NUM_BYTES + i) for i, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(_NUM_BYTES)]


def spell(token: str) -> bytes:
    """Return the bytes that a token encodes, one per character.

    A character outside the table counts as one byte, "?".
    """
    return token.translate(_bytes_of_characters()).encode("latin-1", "replace")


@functools.cache
def _bytes_of_characters() -> dict[int, int]:
    return {ord(char): byte for byte, char in enumerate(characters())}
