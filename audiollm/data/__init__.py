"""From annotated recordings to batches: the sample record, text forms, and what builds on them."""
