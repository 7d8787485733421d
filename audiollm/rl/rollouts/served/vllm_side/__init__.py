"""What runs with the Python of vLLM's environment: this folder is on its path, and no other of audiollm."""
