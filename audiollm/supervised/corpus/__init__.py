"""The corpus of a training: sources, vocabulary, survey, and the batches of a step."""
