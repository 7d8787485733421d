"""Whether a training on fresh answers goes well: rewards against the start's, entropy, skipped steps."""
