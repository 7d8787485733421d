"""Models of the Hugging Face hub by their names: names, the cache, downloads."""
