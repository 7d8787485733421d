"""Recordings as input features of an audio encoder, and their augmentation."""
