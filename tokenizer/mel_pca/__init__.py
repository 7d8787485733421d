"""A linear variational autoencoder of sound in closed form: principal components of log-mel frames."""
