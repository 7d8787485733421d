"""From videos and recordings to chains of thought about sound (AudioCoT). See README.md beside this file."""
