"""Flow matching: sound from video, words and sound."""
