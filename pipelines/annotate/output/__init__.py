"""Output of the annotation: rows of segments, columns in words and their bins."""
