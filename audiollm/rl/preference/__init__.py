"""Training on preferences: the stage `train_preference`, from records of answers to a policy."""
