"""Objectives as pure functions of log-probabilities; `catalog` and `settings` load no torch, `registry` does."""
