"""Weights of few bits: codes in groups, each with a scale and a minimum."""
