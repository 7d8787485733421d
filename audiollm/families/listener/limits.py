"""Limits of transformers' `generate`. Loads no torch."""

MAX_ROWS = 64
"""Most rows of a batch in which rollouts are drawn."""
