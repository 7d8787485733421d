"""The systems under test: our models, transformers' models, endpoints."""
