"""From a prompt to audio codes to sound."""
