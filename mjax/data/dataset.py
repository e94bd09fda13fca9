"""A corpus, tokenized: training and held-out samples."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it becomes samples."""

    path: tuple[str, ...] = ("stdlib",)
    """stdlib, synthetic, or files and folders of text, JSONL or parquet."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json, or train:N (byte-level BPE of N tokens)."""
    seq_len: int = 256
    """Tokens per sequence."""
    held_out_fraction: float = 0.05
    """Share of the documents kept for evaluation."""
    isolate_documents: bool = True
    """No attention across documents of one sequence; positions restart."""
    text_field: str = "text"
    """Field or column that holds the text in JSONL and parquet."""
    vocab: str = "tokenizer"
    """Whose vocabulary size the model takes: tokenizer, or model (--model.vocab-size)."""
    cache_dir: str | None = None
    """Folder of token files; None is the user's cache folder."""
