"""The decoder that is trained: its shape, what it begins from, what of it is trained."""
