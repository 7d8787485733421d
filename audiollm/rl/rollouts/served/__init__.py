"""vLLM as an engine of rollouts, in a process of its own."""
