"""Where the models of a training on fresh answers run: with the training ranks, or in actors of a Ray cluster."""
