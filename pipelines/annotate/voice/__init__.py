"""Voices: activity, pitch, separation, embeddings, diarization, linking across files."""
