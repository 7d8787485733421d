"""Multimodal diffusion transformers over packed rows, their objective and their samplers."""
