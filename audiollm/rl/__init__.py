"""Alignment of audio language models: objectives on preferences, and reward models."""
