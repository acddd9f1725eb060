"""Formats of short numbers, as far as configurations that know no torch must know them."""

FP4_BLOCK = 16
"""Numbers that share a scale in NVFP4."""
