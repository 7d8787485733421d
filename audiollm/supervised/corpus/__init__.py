"""What is trained on: sources, vocabulary, survey, and the batches of a step."""
