"""Compiled functions of single lines: computations on few logits between two passes, where each call's cost counts."""
