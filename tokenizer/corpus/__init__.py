"""The commands `tokenize` and `detokenize`: a corpus to shards of codes and back."""
