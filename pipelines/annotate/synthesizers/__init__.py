"""Synthesizers that speak a corpus: espeak-ng, hibari, Kokoro, and a user's own command."""
