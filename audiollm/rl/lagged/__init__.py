"""Earlier weights of a policy: a reference that is refreshed, and weights that sample ahead."""
