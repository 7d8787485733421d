"""Models and annotated corpora for others: the commands `push` and `export`."""
