"""Make batches of text: corpora, tokenizers, token files, sampler, loader."""
