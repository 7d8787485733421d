"""The family of Qwen3-TTS in its published files."""
