"""Formats of short numbers, as far as configurations that know no torch must know them."""

FP4_BLOCK = 16
"""Numbers that share a scale in NVFP4."""
FP8_GROUP = 128
"""Inputs that share a scale where FP8 has several for an output, as DeepSeek-V3 has."""
