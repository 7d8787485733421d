"""Scores, statistics, and the pages that show them."""
