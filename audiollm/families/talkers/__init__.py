"""What families of talkers have in common: models that choose the codes of a frame with a second decoder."""
