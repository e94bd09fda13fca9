"""README.md of an exported model: its properties, its training, and how to load it.

Input: the contents of the card. Output: a model card with a header that the Hub reads.
It names no folder of the training machine and no license, which the publisher of a
model chooses.

Source: the keys of the header, huggingface.co/docs/hub/model-cards.
"""

import dataclasses
from collections.abc import Iterator

_UNKNOWN = "not recorded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """Contents of the card; None means unknown, unless a field says otherwise."""

    name: str
    """Name of the model, which is the name of its folder."""
    family: str
    """model_type of the family."""
    num_params: int
    dtype: str
    """Dtype of the stored weights."""
    layers: int
    d_model: int
    vocab_size: int
    seq_len: int
    """Longest sequence in training, in tokens."""
    tokenizer: str | None
    """Description of the tokenizer; None without tokenizer files."""
    recipe: str | None
    steps: int
    tokens: int
    """Number of tokens in training."""
    optimizer: str
    """Name and learning rate of the optimizer."""
    data: tuple[str, ...]
    """Names of the corpora."""
    corpus_hash: str | None
    init_from: str | None
    """Name of the initial model; None for random parameters."""
    eval_loss: float | None
    """Held-out loss, nats per token."""
    version: str | None
    """Version of mjax."""


def write_card(card: Card) -> str:
    """Return the text of README.md."""
    return "\n".join([*_header(), *_model(card), *_training(card), *_loading(card), ""])


def _header() -> Iterator[str]:
    yield "---"
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    yield "tags:"
    yield "- mjax"
    yield "# No license is named yet: add one, such as `license: apache-2.0`."
    yield "---"


def _model(card: Card) -> Iterator[str]:
    yield ""
    yield f"# {card.name}"
    yield ""
    yield (
        f"A language model of {card.num_params:,} parameters with the architecture "
        f"`{card.family}`, trained with "
        f"mjax{'' if card.version is None else f' {card.version}'}."
    )
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| layers, width | {card.layers}, {card.d_model} |"
    yield f"| vocabulary | {card.vocab_size:,} |"
    yield f"| tokenizer | {card.tokenizer or 'not in this folder'} |"
    yield f"| longest sequence in training | {card.seq_len:,} tokens |"
    yield f"| stored as | {card.dtype} |"
    yield "| license | none named yet |"


def _training(card: Card) -> Iterator[str]:
    loss = card.eval_loss
    yield ""
    yield "## Training"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| recipe | {card.recipe or _UNKNOWN} |"
    yield f"| initialised from | {card.init_from or 'random parameters'} |"
    yield f"| data | {', '.join(card.data)} |"
    yield f"| hash of the data | {card.corpus_hash or _UNKNOWN} |"
    yield f"| steps | {card.steps:,} |"
    yield f"| tokens | {card.tokens:,} |"
    yield f"| optimizer | {card.optimizer} |"
    held_out = "not evaluated at this step" if loss is None else f"{loss:.4f}"
    unit = "" if loss is None else " nats per token"
    yield f"| held-out loss | {held_out}{unit} |"


def _loading(card: Card) -> Iterator[str]:
    yield ""
    yield "## Use"
    yield ""
    yield "With transformers, in the folder above this one:"
    yield ""
    yield "```python"
    names = ["AutoModelForCausalLM"]
    names += ["AutoTokenizer"] if card.tokenizer is not None else []
    yield f"from transformers import {', '.join(names)}"
    yield ""
    yield f'model = AutoModelForCausalLM.from_pretrained("{card.name}")'
    if card.tokenizer is not None:
        yield f'tokenizer = AutoTokenizer.from_pretrained("{card.name}")'
        yield 'inputs = tokenizer("def ", return_tensors="pt")'
        yield "tokens = model.generate(**inputs, max_new_tokens=64, do_sample=True)"
        yield "print(tokenizer.decode(tokens[0]))"
    yield "```"
    yield ""
    yield "With mjax:"
    yield ""
    yield "```"
    if card.tokenizer is not None:
        yield f'python -m mjax.generate {card.name} --prompt "def "'
    yield f"python -m mjax.ckpt show {card.name}  # the flags of the model"
    yield f"python -m mjax.train --init-from {card.name} FLAGS"
    yield "```"
