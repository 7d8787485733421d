"""The stage `encode_features`: rows of a frozen audio encoder, computed once."""
