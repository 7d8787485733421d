"""Live interpretation: sound in, chunk by chunk, words and speech out."""
