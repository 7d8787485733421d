"""Clips of data folders and runs, as the tabs beside the editor show them."""
