"""Higgs Audio v3 STT (`higgs_audio_3`): its model and processor, over transformers' Whisper and Qwen3."""
