"""Log-probabilities of answers: what any policy computes, and objectives read."""
