"""Suites on generated sounds: how near they are to real ones, what is heard, when, and whether they are copies."""
