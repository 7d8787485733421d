"""From a text or a dialogue to speech: prompts, voices, long texts, streams."""
