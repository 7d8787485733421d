"""Data: samples on disk, chat templates, text forms, audio features and packed batches."""
