"""Kernels for a CPU: C++ where it is built, torch functions elsewhere."""
