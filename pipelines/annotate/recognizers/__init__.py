"""Speech recognizers as steps: Pocketsphinx, Whisper, transformers, endpoints, audio LLMs."""
