"""Samples and where they lie: manifests, shards, storage, mixtures, the loader."""
