"""Weights that do not learn, stored in fewer bytes: bf16, int8, nf4."""
