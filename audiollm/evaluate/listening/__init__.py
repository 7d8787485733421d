"""Suites on audio understanding: transcripts and questions."""
