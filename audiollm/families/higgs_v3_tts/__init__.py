"""The family of Higgs Audio v3 TTS in its published files."""
