"""Audio LLMs of transformers: loaded from local folders, and the inputs that their processors make."""
