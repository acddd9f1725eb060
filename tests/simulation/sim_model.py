"""The simulated model: tokens that one can do by hand, read back out of a paged cache.

A token follows from all tokens before it, its position and the sequence's seed. Every cell of the
cache names its whole context, so a block that is shared wrongly, freed too early or believed too
soon shows as an assertion, and what was lost or repeated changes all tokens that follow. With a
sliding window only what is inside is read, and no entry that is read or written is ever scratch.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.engine.blocks import SCRATCH
from cluster.engine.sequence import Sequence
from cluster.wire.messages import PENDING, GenerateRequest, StepPlan
from compile.config import CUDAGraphMode
from compile.dispatch import CapturedGraphs

MAX_DRAFTS = 3
GRAPHS = CapturedGraphs(
    CUDAGraphMode.FULL_DECODE_ONLY,
    batch_sizes=(1, 2, 4, 8),
    draft_batch_sizes=(2, 4),
    query_len=1 + MAX_DRAFTS,
)
"""What every rank of a simulation has captured."""

Cell = tuple[int, int]
"""A token and the hash of its whole context: what a KV entry depends on."""


def _extend(context: int, token: int) -> int:
    return hash((context, token))


def _draw(seed: int, output_index: int, context: int, vocab: int) -> int:
    return hash((seed, output_index, context)) % vocab


def continuation(
    request: GenerateRequest, vocab: int, max_model_len: int, weights: int = 0
) -> list[int]:
    """Return all output tokens of a request, without any cache: the oracle."""
    tokens, output, sampling = list(request.prompt_token_ids), list[int](), request.sampling
    context = weights
    for token in tokens:
        context = _extend(context, token)
    while len(output) < sampling.max_tokens and len(tokens) < max_model_len:
        token = _draw(sampling.seed, len(output), context, vocab)
        tokens.append(token)
        output.append(token)
        context = _extend(context, token)
        if token in sampling.stop_token_ids:
            break
    return output


class SimDrafter:
    """Knows what comes, and drafts that as far as the context says; then something else, up to
    tokens that no text has, or past its end."""

    def __init__(self, most: int, vocab: int, max_model_len: int, weights: int = 0) -> None:
        self.most = most
        self._vocab = vocab
        self._max_model_len = max_model_len
        self._weights = weights

    def propose(self, seq: Sequence, most: int) -> list[int]:
        text = continuation(seq.request, self._vocab, self._max_model_len, self._weights)
        context = hash((seq.request.sampling.seed, *seq.token_ids))
        num_tokens, num_right = context % (most + 1), context // 8 % (most + 1)
        start = seq.num_tokens - seq.num_prompt_tokens
        right = text[start : start + min(num_right, num_tokens)]
        stops = seq.request.sampling.stop_token_ids or (0,)
        return right + [stops[0] if context % 3 else self._vocab - 1] * (num_tokens - len(right))


class PagedModel:
    """Rows and KV of one rank, and a model that reads its context out of it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab: int,
        window: int | None = None,
        weights: int = 0,
    ) -> None:
        """Models of other `weights` draw other tokens, and cannot go on with each other's KV."""
        self._block_size = block_size
        self._window = window
        self._weights = weights
        self._vocab = vocab
        self.tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._seeds = [0] * max_num_seqs
        self._last_tokens = [-1] * max_num_seqs
        self.blocks: list[list[Cell | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        """The cells of each block: what ranks of other groups read."""

    def run(self, plan: StepPlan) -> list[int]:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], list[int]]:
        """Apply a plan to the rows; return what runs it, as late as one likes."""
        for admission in plan.admitted:
            self._seeds[admission.row] = admission.seed
        for new in plan.new_blocks:
            table = self.tables[new.row]
            assert new.start <= len(table), "a block table grows at its end or is written anew"
            table[new.start :] = new.block_ids
        tables = [self.tables[row].copy() for row in plan.rows]
        seeds = [self._seeds[row] for row in plan.rows]
        return lambda: self._run(plan, tables, seeds)

    def _run(self, plan: StepPlan, tables: list[list[int]], seeds: list[int]) -> list[int]:
        """Run a plan: all contexts are read before anything is written."""
        contexts = list(map(self._context, tables, plan.num_computed))
        tokens, drawn = iter(plan.token_ids), list[int]()
        for i, (row, num_drawn) in enumerate(zip(plan.rows, plan.num_drawn, strict=True)):
            context, end = contexts[i], plan.num_computed[i] + plan.num_new[i]
            for position in range(plan.num_computed[i], end):
                token = next(tokens)
                if token == PENDING:
                    token = self._last_tokens[row]
                assert token >= 0, "nothing was drawn in this row"
                context = _extend(context, token)
                block = tables[i][position // self._block_size]
                assert block != SCRATCH, "a token's KV was written to the scratch block"
                self.blocks[block][position % self._block_size] = (token, context)
                if position >= end - num_drawn:
                    output_index = plan.output_index[i] + position - (end - num_drawn)
                    token = _draw(seeds[i], output_index, context, self._vocab)
                    self._last_tokens[row] = token
                    drawn.append(token)
        return drawn

    def _context(self, table: list[int], num_computed: int) -> int:
        """Return the hash of a row's computed tokens, as read back out of the cache."""
        context = self._weights
        start = 0 if self._window is None else max(0, num_computed - self._window + 1)
        for position in range(start, num_computed):
            block = table[position // self._block_size]
            assert block != SCRATCH, "a token inside the window was read from the scratch block"
            cell = self.blocks[block][position % self._block_size]
            assert cell is not None, f"block {block} was read before it was written"
            # What lies before the window is known from its first cell alone; a wrong one shows
            # as another text than the oracle's.
            context = cell[1] if position == start > 0 else _extend(context, cell[0])
            assert context == cell[1], f"block {block} holds another context's KV"
        return context
