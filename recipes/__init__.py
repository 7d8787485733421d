"""Recipes, installed as data: `importlib.resources.files("recipes")`."""
