"""The `native` tokenizer: encoder, decoder, streaming."""
