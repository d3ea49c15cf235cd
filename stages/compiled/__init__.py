"""Kernels that are compiled for the processor at hand when a model is loaded, by LLVM through llvmlite."""
