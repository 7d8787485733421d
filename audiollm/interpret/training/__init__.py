"""Training of interpreters by policy gradients over streams: the stage `train_interpreter`."""
