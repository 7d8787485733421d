"""Sweeps: many runs of a recipe with other settings, and which of them are best."""
