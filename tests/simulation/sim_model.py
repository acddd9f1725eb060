"""The simulated model: tokens that one can do by hand, read back out of a paged cache.

A token is the hash of all tokens before it. One that is lost, repeated or computed from a wrong
block changes all that follow.
"""

from __future__ import annotations

from sim_schedule import MAX_MODEL_LEN, VOCAB

from cluster.engine.blocks import SCRATCH
from cluster.wire.messages import PENDING, StepPlan
from compile.config import CUDAGraphMode
from compile.dispatch import CapturedGraphs

GRAPHS = CapturedGraphs(CUDAGraphMode.FULL_DECODE_ONLY, batch_sizes=(1, 2, 4, 8))
"""What every rank of a simulation has captured."""


def continuation(prompt: list[int], max_tokens: int, stop: tuple[int, ...]) -> list[int]:
    """Return all output tokens of a request: the oracle."""
    context, output = 0, list[int]()
    for token in prompt:
        context = hash((context, token))
    for _ in range(min(max_tokens, MAX_MODEL_LEN - len(prompt))):
        token = context % VOCAB
        output.append(token)
        context = hash((context, token))
        if token in stop:
            break
    return output


class PagedModel:
    """Rows and KV of one rank: a cell holds the hash of its whole context."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self._block_size = block_size
        self._tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._last_tokens = [-1] * max_num_seqs
        self.blocks = [[0] * block_size for _ in range(num_blocks + 1)]
        """The cells of each block: what ranks of other groups read."""

    def run(self, plan: StepPlan) -> list[int]:
        """Compute a plan; return what it sampled."""
        for new in plan.new_blocks:
            self._tables[new.row][new.start :] = new.block_ids
        size, blocks, token_ids = self._block_size, self.blocks, iter(plan.token_ids)
        drawn = list[int]()
        for row, position, num_new, index in zip(
            plan.rows, plan.num_computed, plan.num_new, plan.output_index, strict=True
        ):
            table, context = self._tables[row], 0
            if position:
                context = blocks[table[(position - 1) // size]][(position - 1) % size]
            for place in range(position, position + num_new):
                token = next(token_ids)
                token = self._last_tokens[row] if token == PENDING else token
                context = hash((context, token))
                block = table[place // size]
                assert block != SCRATCH, "KV was written to the scratch block"
                blocks[block][place % size] = context
            if index >= 0:
                self._last_tokens[row] = context % VOCAB
                drawn.append(self._last_tokens[row])
        return drawn
