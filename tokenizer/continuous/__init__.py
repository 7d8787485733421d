"""The variational autoencoder of sounds, and its training."""
