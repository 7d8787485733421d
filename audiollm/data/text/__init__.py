"""Text: the spoken and written forms, normalization, and the text tokenizer."""
