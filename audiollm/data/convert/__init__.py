"""Datasets of others to a JSONL manifest of samples: `audiollm convert KIND SOURCE -o samples.jsonl`."""
