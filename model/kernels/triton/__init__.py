"""Kernels for a GPU, in Triton, each the twin of a torch function or a CPU kernel."""
