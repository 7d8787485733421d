"""The part of the page on policies that were trained on their own answers."""
