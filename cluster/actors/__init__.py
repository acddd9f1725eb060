"""Placement, rank actors and rank groups: the only files of the package that import ray."""
