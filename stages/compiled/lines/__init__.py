"""Compiled functions of single lines: what is asked of a few logits between two passes, where every call counts."""
