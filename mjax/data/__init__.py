"""Text in, batches out: corpora, tokenizers, token files, sampler, loader."""
