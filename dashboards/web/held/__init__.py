"""What the checkpoint and the versions of a run hold: contexts of the memory, and n-grams."""
