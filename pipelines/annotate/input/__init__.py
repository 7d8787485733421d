"""Input of the annotation: files, archives, transcripts, and the synthetic corpus."""
