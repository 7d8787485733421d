"""Limits of the DualFFN's engine. Loads no torch."""

MAX_SLOTS = 256
"""Most rollouts that the engine samples side by side."""
