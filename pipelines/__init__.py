"""From raw recordings to training data, and from a run to its report."""
