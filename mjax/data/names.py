"""Values of `--data.path` and `--data.tokenizer` that do not name files."""

STDLIB = "stdlib"
SYNTHETIC = "synthetic"

BYTES = "bytes"
TRAIN = "train"

NUM_BYTES = 256
_MAX_TRAINED = 1 << 20


def trained_vocab_size(name: str) -> int | None:
    """Return N of `train:N`; None for any other kind of tokenizer.

    Raises:
      ValueError: N is not a number, or is too small or too large for a vocabulary.
    """
    kind, colon, size = name.partition(":")
    if kind != TRAIN:
        return None
    smallest = NUM_BYTES + 1
    is_number = size.isascii() and size.isdigit()
    if not colon or not is_number or not smallest <= int(size) <= _MAX_TRAINED:
        raise ValueError(
            f"--data.tokenizer must be train:N with N from {smallest} (256 bytes and "
            f"the end of a document) to {_MAX_TRAINED}, got {name}; for example "
            "train:8192"
        )
    return int(size)
