"""Edits of sound in everyday words: read by a grammar, resolved by the events of a chain of thought."""

from pipelines.instructions.reading import EditKind, EditPlan, names_times, read_instruction
from pipelines.instructions.resolution import InstructionQuestion

__all__ = ["EditKind", "EditPlan", "InstructionQuestion", "names_times", "read_instruction"]
