"""One training loop for the whole project, and the tasks that train through it."""
