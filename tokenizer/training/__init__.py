"""Training a tokenizer: data, losses, discriminators, the stages."""
