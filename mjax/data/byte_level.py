"""The `bytes` tokenizer as a tokenizer.json that other libraries load.

Input: the name of the token that ends a document. Output: the text of a byte-level BPE
without merges: the id of a byte is its value, and 256 ends a document. No library is
needed to write it.

Source: the table of characters that stand for bytes is GPT-2's (`bytes_to_unicode` in
github.com/openai/gpt-2, src/encoder.py), which the `tokenizers` library calls
ByteLevel; the fields are those of its tokenizer.json.
"""

import functools
import json

_NUM_BYTES = 256
# The bytes that stand for themselves in GPT-2's table.
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}


@functools.cache
def spec_json(eos_token: str) -> str:
    """Return the text of the tokenizer.json.

    mjax recognises a folder by this text, so it must not change between versions.

    Args:
      eos_token: name of token 256, which ends a document.
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
        "post_processor": None,
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


def characters() -> list[str]:
    """Return the character that stands for each byte.

    Printable bytes stand for themselves. The characters from 256 on stand for the other
    bytes, in order.
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
