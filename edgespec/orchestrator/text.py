"""Text in, text out: tokenizers, chat templates, incremental detokenising, stop strings."""
