"""Token counts across data-parallel ranks, against gloo collectives that compute the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from wire_structs import vote_of

from cluster.engine.lockstep import agree
from cluster.rank.runner import get_dp_padding
from cluster.wire.messages import StepKind
from compile.context import DPMetadata
from compile.dispatch import CapturedGraphs

CASES = [(3, 9), (5, 5), (1, 7, 4), (12, 2, 12, 1)]


def all_reduced(rank: int, tokens: tuple[int, ...], store: Any) -> torch.Tensor:
    """Return all ranks' counts as engines get them that have no agreement (after ATOM)."""
    group = ProcessGroupGloo(store, rank, len(tokens), timedelta(seconds=60))
    counts = torch.zeros(len(tokens), dtype=torch.int32)
    counts[rank] = tokens[rank]
    dist.all_reduce(counts, group=group)  # an all-gather, spelled as a sum
    return counts


@pytest.mark.feature("P03")
@pytest.mark.parametrize("tokens", CASES)
def test_padding_and_metadata_are_those_of_an_all_reduce(tokens: tuple[int, ...]) -> None:
    store, size = dist.HashStore(), len(tokens)
    with ThreadPoolExecutor(size) as threads:
        counts = list(threads.map(lambda rank: all_reduced(rank, tokens, store), range(size)))
    decode = agree([vote_of(n) for n in tokens], CapturedGraphs())
    mixed = agree([vote_of(1, n, kind=StepKind.MIXED) for n in tokens], CapturedGraphs())
    for rank, across in enumerate(counts):
        longest = int(across.max())
        assert decode.num_tokens_across_dp == (longest,) * size
        assert mixed.num_tokens_across_dp == tuple(across.tolist())
        assert get_dp_padding(decode, rank) == longest - tokens[rank]
        assert get_dp_padding(mixed, rank) == 0
        made = DPMetadata.make(tokens, rank, tokens[rank])
        assert made.max_tokens_across_dp == int(across.max())
        for max_chunk in (1, 3, 4, 100):
            for index in range(-(-max(tokens) // max_chunk)):
                chunk = (across - max_chunk * index).clamp(max=max_chunk).clamp(min=1)
                assert list(made.chunked_sizes(max_chunk, index)) == chunk.tolist()


def test_a_rank_that_runs_other_tokens_than_agreed_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens: wanted 9 as all ranks agreed, found 8"):
        DPMetadata.make((3, 9), 1, 8)
