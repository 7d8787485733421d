"""The family of transformers' audio LLMs, which hear and answer in words."""
