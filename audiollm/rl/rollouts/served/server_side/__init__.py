"""What runs with the Python of a server's environment: this folder is on its path, and no other of audiollm."""
