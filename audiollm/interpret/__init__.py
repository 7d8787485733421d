"""Simultaneous interpretation: streams that are heard chunk by chunk, actions after each chunk, and their rewards."""
