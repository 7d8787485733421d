"""Rewards of sampled answers: built in by name, or a user's own functions, weighted and summed."""
