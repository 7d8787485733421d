"""What comes in: files, archives, transcripts, and the synthetic corpus."""
