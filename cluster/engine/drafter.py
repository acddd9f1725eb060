"""Drafts of what a sequence may say next, for steps that check several tokens at once.

A sequence's next token and a draft of those behind it are computed in one step. Each position draws
its own token, by its own seed and output position, as it would without a draft; drafts are kept as
long as they are what was drawn. So the tokens are those of an engine without speculation, drawn or
greedy, and a bad draft costs time alone. For drafts of one token a position this is speculative
sampling (Leviathan et al., 2023), whose acceptance leaves the distribution as it is.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.config import EngineConfig, SpeculationConfig
from cluster.engine.sequence import Sequence


class Drafter(Protocol):
    most: int
    """Draft tokens of a sequence in a step, at most."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Return up to `most` draft tokens behind the sequence's last one, which is known."""


class NgramDrafter:
    """Takes a sequence's last tokens for the beginning of something that it has said before: of the
    longest such run, the earliest place that has one, and what followed there (prompt lookup
    decoding, Saxena 2023; vLLM's `ngram`)."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self.most = config.num_speculative_tokens

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Return none if what the sequence ends with is new."""
        config, tokens = self._config, _history(seq)
        num_tokens = len(tokens)
        # Where the last token stood before, with something behind it.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1
        while length < config.prompt_lookup_max and len(ends):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[num_tokens - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < config.prompt_lookup_min or not len(ends):
            return []
        start = int(ends[0]) + 1
        return seq.token_ids[start : start + most]


class MTPDrafter:
    """Takes what the ranks' MTP layer found in the step that drew a sequence's last token. A
    sequence without such a step here, as after a handoff, has one without a draft first."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.most = config.num_speculative_tokens

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return seq.next_draft[:most]


def drafter_of(config: EngineConfig) -> Drafter | None:
    if config.speculation is None:
        return None
    return (MTPDrafter if config.cache.has_mtp else NgramDrafter)(config.speculation)


def _history(seq: Sequence) -> npt.NDArray[np.int32]:
    """Return the sequence's tokens as an array, which is kept and grows with them."""
    known, num_tokens = seq.history, seq.num_tokens
    array, filled = (np.empty(0, dtype=np.int32), 0) if known is None else known
    if num_tokens > len(array):
        grown = np.empty(max(2 * num_tokens, 256), dtype=np.int32)
        grown[:filled] = array[:filled]
        array = grown
    array[filled:num_tokens] = seq.token_ids[filled:]
    seq.history = array, num_tokens
    return array[:num_tokens]
