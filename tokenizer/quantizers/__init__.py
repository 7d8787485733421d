"""Residual vector quantization and finite scalar quantization."""
