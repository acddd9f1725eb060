"""Judges what came of a row: tokens, steps, graphs, handoffs, and that nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from local_ranks import BLOCK_SIZE
from parity_oracle import TIE_GAP
from parity_process import EPOCH, Report
from parity_rows import LOADS, Run, window_of

from cluster.wire.messages import StepKind
from compile.config import CompilationLevel, CUDAGraphMode
from compile.dispatch import BatchDescriptor, padded_size

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
NUM_LOGGED = 1000
"""Steps that a rank remembers."""
MAX_DRAFTS = 100
"""Of a pool, that are compared: each takes milliseconds."""


def check(run: Run, drawn: list[list[int]] | None = None) -> None:
    """Judge a run; `drawn` is what one eager rank drew, for requests that are not greedy."""
    check_tokens(run, drawn)
    for name, ranks in run.pools.items():
        check_steps(run, name, ranks)
        check_replays(run, ranks)
        for leader in ranks[:: run.row.tp]:
            assert leader.stats.scheduler.num_free_blocks == leader.stats.scheduler.num_blocks > 0
            assert leader.stats.scheduler.num_running == leader.stats.scheduler.num_handoffs == 0
    if run.row.kv:
        check_handoffs(run)
    if run.row.level == CompilationLevel.PIECEWISE:
        check_directories(run)
    if run.row.has_mtp:
        check_drafts(run)
    LOADS[run.row.load].expect(run)


def check_drafts(run: Run) -> None:
    """Drafts are what the layer says of whole sequences: whatever chunks they were computed in,
    found in the cache, handed over, or drafted wrongly before. Where one is missing, there was no
    step before, or it was the prompt's."""
    oracle, rng = run.oracle, random.Random(0)
    for ranks in run.pools.values():
        drafts = [draft for rank in ranks for draft in rank.drafts]
        found = [(tokens, draft) for tokens, draft in drafts if draft]
        assert len(found) >= len(drafts) - len(run.requests)
        for token_ids, draft in rng.sample(found, min(len(found), MAX_DRAFTS)):
            gaps = oracle.mtp.gaps(token_ids, draft)
            assert max(gaps) < TIE_GAP, (len(token_ids), draft, gaps)


@torch.inference_mode()
def check_tokens(run: Run, drawn: list[list[int]] | None) -> None:
    """Each request got all of its tokens, each its oracle's, and log-probabilities as asked."""
    oracle = run.oracle
    for i, (request, outputs) in enumerate(zip(run.requests, run.outputs, strict=True)):
        tokens = run.tokens[i]
        if request.leaves_after:
            assert len(tokens) >= request.leaves_after and not outputs[-1].finish_reason
        else:
            assert len(tokens) == request.max_tokens
            ends = [output.finish_reason for output in outputs]
            assert ends == [""] * (len(outputs) - 1) + ["length"], outputs[-1]
        if not request.is_greedy:
            assert drawn is not None and tokens == drawn[i]
            continue
        oracle.check_greedy(request.prompt, tokens, request.lora)
        logprobs = [logprob for output in outputs for logprob in output.logprobs]
        if request.sampling.get("num_logprobs", -1) >= 0:
            theirs = oracle.logits(request.prompt, tokens).log_softmax(-1)
            for wanted, found in zip(theirs, logprobs, strict=True):
                ours = torch.empty_like(wanted)
                ours[torch.tensor(found.top_token_ids)] = torch.tensor(found.top_logprobs)
                torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-5)
                assert found.rank == 1
        if request.sampling.get("num_prompt_logprobs", -1) >= 0:
            rest = request.prompt[1:]
            theirs = oracle.logits(request.prompt[:1], rest).log_softmax(-1)
            wanted = theirs.gather(1, torch.tensor(rest)[:, None]).flatten().tolist()
            ours = [entry.logprob for entry in outputs[0].prompt_logprobs]
            assert ours == pytest.approx(wanted, abs=1e-4)
    oracle.report_ties()


def check_steps(run: Run, pool: str, ranks: list[Report]) -> None:
    """All ranks ran the same steps, in the mode of their kind, padded to one captured size."""
    leader, captured = ranks[0], ranks[0].captured
    assert {rank.captured for rank in ranks} == {captured}
    assert all(rank.log[-NUM_LOGGED:] == leader.log[-NUM_LOGGED:] for rank in ranks)
    assert not any(rank.num_late for rank in ranks)
    for i, rank in enumerate(ranks):  # a leader also counts steps without work
        assert 0 < rank.stats.step <= ranks[i - i % run.row.tp].stats.step
    for step in leader.log:
        assert step["epoch"] == EPOCH
        is_decode = step["kind"] == StepKind.DECODE
        mode = run.row.mode.decode_mode() if is_decode else run.row.mode.mixed_mode()
        assert step["mode"] == mode.value, step
        most = max(step["num_scheduled_tokens"])
        captured_sizes = captured.batch_sizes
        if mode is PIECEWISE or not is_decode:
            mixed_tokens = tuple(key.num_tokens for key in captured.mixed)
            captured_sizes = captured.token_counts or mixed_tokens
        if is_decode and mode is FULL and step["num_tokens"] != step["graph_bs"]:
            assert run.row.drafts, step
            assert step["graph_bs"] in captured.draft_batch_sizes, step
            assert step["num_tokens"] == step["graph_bs"] * (1 + run.row.drafts) >= most, step
            continue
        if mode is not NONE:
            assert step["num_tokens"] == padded_size(captured_sizes, most), step
        if is_decode:
            assert step["graph_bs"] == (step["num_tokens"] if mode is FULL else most), step


def check_replays(run: Run, ranks: list[Report]) -> None:
    """Every step of a mode that replays was a replay on every rank, dummy steps included."""
    log = ranks[0].log
    if run.replays_by_step is not None:
        num_replays = {NONE: 0, PIECEWISE: run.num_pieces, FULL: 1}
        wanted = [
            num_replays[CUDAGraphMode(step["mode"])]
            + (run.row.has_mtp and step["mode"] == FULL.value)
            + (run.row.scores and step["mode"] == FULL.value and step["kind"] == StepKind.DECODE)
            for step in log
        ]
        assert run.replays_by_step == wanted
    graphs = Counter(
        BatchDescriptor(step["num_tokens"], seqs_of(run, step), step["kind"] == StepKind.DECODE)
        for step in log
        if step["mode"] == FULL.value
    )
    num_pieces = sum(step["mode"] == PIECEWISE.value for step in log)
    for rank in ranks:
        assert Counter(rank.replays) == graphs
        if run.row.has_mtp:
            check_draft_replays(rank, graphs)
        assert rank.piecewise_steps == num_pieces


def check_draft_replays(rank: Report, graphs: Counter[BatchDescriptor]) -> None:
    """The MTP layer is replayed with the step, and in steps that decode for each further draft."""
    steps, further = rank.draft_replays
    assert steps == dict(graphs)
    num_further = max(rank.captured.query_len - 2, 0)
    assert all(times % num_further == 0 for times in further.values())
    sizes = Counter[int]()
    for key, times in graphs.items():
        sizes[key.num_seqs or 0] += times * key.uniform_decode
    for size, times in sizes.items():
        assert further.get(BatchDescriptor(size, size, True), 0) >= times * num_further


def seqs_of(run: Run, step: dict[str, Any]) -> int:
    if step["kind"] == StepKind.DECODE:
        return int(step["graph_bs"])
    return min(int(step["num_tokens"]), LOADS[run.row.load].max_num_seqs)


def check_handoffs(run: Run) -> None:
    """Each prompt was computed by one pool, and its KV went once to the rank of the same place."""
    prefill, decode = run.pools["prefill"], run.pools["decode"]
    assert not any(rank.stats.scheduler.num_handoffs for rank in prefill)
    sent = [rank.stats.kv_bytes_sent for rank in prefill]
    if any(request.leaves_after for request in run.requests):
        return  # who left may have done so before its KV came
    assert sent == [rank.stats.kv_bytes_received for rank in decode]
    lengths = [len(request.prompt) for request in run.requests]
    for i, rank in enumerate(prefill):
        num_blocks = 0
        if run.row.loses is not None:
            # The first read's slice of another rank than the one that lost its handoff was sent and
            # received; it was of no use. The next attempt starts from the first output token.
            num_blocks = sum(blocks_of(run, length + 1) for length in lengths)
        if i % run.row.tp != run.row.loses:
            num_blocks += sum(blocks_of(run, length) for length in lengths)
        assert rank.stats.kv_bytes_sent == num_blocks * rank.block_bytes > 0
    if run.row.loses is None:
        assert sum(rank.stats.scheduler.prompt_tokens_computed for rank in prefill) == sum(lengths)
        # Pre-empted sequences are computed again where they are; without pre-emption, none.
        computed = sum(rank.stats.scheduler.prompt_tokens_computed for rank in decode)
        assert (computed == 0) == (run.num_preemptions == 0)
    else:
        assert len(prefill[run.row.loses].lost) == len(run.requests)


def blocks_of(run: Run, length: int) -> int:
    """Return the blocks that hold what the token behind a prompt of this length reads."""
    window = window_of(run.oracle)
    passed = 0 if window is None else max(0, length + 1 - window) // BLOCK_SIZE
    return -(-length // BLOCK_SIZE) - passed


def check_directories(run: Run) -> None:
    """Each rank has a directory of its own, named by its place; what it holds is shared."""
    row, root = run.row, Path(run.config.compilation.cache_dir)
    wanted = {f"rank_{tp}_{dp}" for tp in range(row.tp) for dp in range(row.dp)}
    assert {path.name for path in root.glob("*/rank_*")} == wanted
