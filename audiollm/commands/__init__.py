"""The console script and the commands that belong to no single package."""
