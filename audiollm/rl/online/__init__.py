"""Policies trained on their own fresh answers: the stage `train_policy`."""
