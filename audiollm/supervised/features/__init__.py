"""What a frozen audio encoder makes of recordings, computed once: the stage `encode_features`."""
