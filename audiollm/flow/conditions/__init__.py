"""Conditions of a sound: words and pictures of a sample, encoders that are trained along, and pretrained ones."""
