"""Suites on generated speech: words, voices, emotions, dialogues, preferences."""
