"""From raw recordings to segments: who said what, when, how well. See README.md beside this file."""
