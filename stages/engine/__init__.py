"""The engine: models and their forward passes."""
