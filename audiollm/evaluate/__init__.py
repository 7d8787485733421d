"""Judges and benchmarks: what scores a model, and shares nothing with it."""
