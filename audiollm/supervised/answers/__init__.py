"""Supervised training of a policy of any family: cross entropy on the last turn of a conversation."""
