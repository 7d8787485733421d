"""Plans of many callers beside each other: one thread owns the engines of the loaded models."""
