"""Kernels, each beside the torch function that it must equal."""
