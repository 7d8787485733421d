"""Conversion of a sample to a token stream: tasks, templates, conditions, fitting, the delay pattern."""
