"""Sounds that are made of kept clips: pairs of stage 2 and edits of stage 3."""
