"""A forward pass that is compiled for the processor at hand when a model is loaded."""
