"""The family of the DualFFN."""
