"""A run of the steps: configuration, rules, presets, walks, workers."""
