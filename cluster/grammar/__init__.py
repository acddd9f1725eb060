"""Grammars: compiled beside the step thread, and masks of the tokens that may come next."""
