"""The family of Sesame's CSM in transformers' files."""
