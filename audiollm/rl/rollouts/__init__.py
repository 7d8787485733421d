"""Rollouts: answers that a policy samples for its own training, with the log-probability of every action."""
