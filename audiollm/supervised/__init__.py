"""Supervised training of the DualFFN decoder: batches, losses, the stage `train`."""
