"""Supervised training of models that answer in words: cross entropy on the last turn of a conversation."""
