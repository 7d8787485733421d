"""What is left: rows of segments, columns in words and their bins."""
