"""Supervised training of a model of any family: batches, tasks, the stage `train`; merged models."""
