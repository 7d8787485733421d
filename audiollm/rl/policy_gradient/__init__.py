"""Advantages, policy gradients, KL and their corrections as pure functions; `catalog` and `settings` load no torch."""
