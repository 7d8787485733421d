"""Editing of tracks: their files kept as they are, seams, and the operations."""
