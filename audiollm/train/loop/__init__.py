"""The training loop, independent of the model: task, checkpoints, monitor, optimizers, budget."""
