"""Soundscapes: clips composed of labelled sounds, music and speech, and questions about them with known answers."""
