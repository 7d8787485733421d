"""Composed scenes: moving objects that sound when they strike, with texts, regions and solo tracks."""
