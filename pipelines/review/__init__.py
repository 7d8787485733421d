"""Corrections of an annotation by people: their file, their use by later stages, and the page to make them."""
