"""Passes over traced graphs: what they are, how they are run, and the passes themselves."""
