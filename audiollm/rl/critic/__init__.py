"""Critics: a value head beside a policy, its model and its settings."""
