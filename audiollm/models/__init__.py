"""Model definitions: attention over packed sequences and the DualFFN decoder."""
