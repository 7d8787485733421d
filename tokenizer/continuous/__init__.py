"""The variational autoencoder of 44.1 kHz stereo, and its training."""
