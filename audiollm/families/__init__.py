"""Families of models: the one place that knows a model's kind."""
