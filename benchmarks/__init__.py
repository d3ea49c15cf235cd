"""Benchmarks, studies and the training of the built-in models: what measures the product, and is not part of it."""
