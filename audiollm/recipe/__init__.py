"""Recipes: configuration, stages, the runner, and the processes (ranks) of a run."""
