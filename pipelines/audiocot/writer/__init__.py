"""Models that write chains of thought: their answers beside the truth."""
