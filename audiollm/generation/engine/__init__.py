"""The generation engine: requests, continuous batches, sampling, streaming."""
