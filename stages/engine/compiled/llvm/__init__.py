"""Functions that are written operation by operation, compiled by LLVM through llvmlite, and run on all threads."""
