"""Judges that share nothing with the model: recognizers, classifiers, pretrained models."""
