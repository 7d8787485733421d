"""Policies: log-probabilities of answers under a trained model and its reference, in one protocol for all models."""
