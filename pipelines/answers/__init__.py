"""Answers of a model to its own prompts: sampled and scored (`sample_answers`), and selected (`select_answers`)."""
