"""Measurements on a signal or a corpus: noise, quality, tags, duplicates."""
