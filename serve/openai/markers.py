"""Markers: texts that divide an answer, which may arrive cut anywhere."""

from __future__ import annotations


def start_of_part(text: str, position: int, markers: tuple[str, ...]) -> int:
    """Return where the end of the text begins that may be the start of a marker."""
    longest = max(map(len, markers)) - 1
    for start in range(max(position, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)
