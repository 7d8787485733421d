"""Semantic teachers: loading them, training one."""
