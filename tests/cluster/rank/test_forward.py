"""Forwards of a rank run in the context of their step, captured or not, and as all agreed."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from local_ranks import config_of
from wire_structs import admission_of, plan_of, submit_of, vote_of

from cluster.config import SpeculationConfig
from cluster.engine.lockstep import AloneLockstep
from cluster.group.context import RankContext
from cluster.group.membership import GroupMembership
from cluster.rank import forward
from cluster.rank.free_memory import MARGIN_BYTES, bytes_per_token
from cluster.rank.leader import assemble_engine
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import NewBlocks, StepAgreement, StepKind, StepPlan, Vote
from compile.config import CUDAGraphMode
from compile.context import (
    BatchDescriptor,
    Context,
    DPMetadata,
    ForwardContext,
    forward_context,
    get_forward_context,
)
from compile.counters import counter
from compile.dispatch import decide
from compile.errors import LateCapture
from compile.graphs.capture import is_in_capture_window
from model.config import ModelConfig
from model.kernels import cpu
from model.layers.attention import AttentionMetadata
from model.parallel import Shard

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
GRAPH_BS, GRAPH_TOKENS = (1, 2, 4), (4, 8, 16)
MAX_NUM_SEQS = 6


def make_runner(
    oracle: Any,
    mode: str,
    level: int = 0,
    fields: dict[str, Any] | None = None,
    speculation: SpeculationConfig | None = None,
    **arguments: Any,
) -> ModelRunner:
    sizes: dict[str, Any] = {}
    if mode != "NONE":
        sizes |= {"cudagraph_capture_sizes": GRAPH_BS, "num_warmups_full": 1}
    if mode in ("FULL", "FULL_AND_PIECEWISE"):
        sizes["capture_num_tokens"] = GRAPH_TOKENS
    plain: dict[str, Any] = {"use_inductor": False, "sealed": "warn", **sizes, **(fields or {})}
    config = config_of(
        oracle.path,
        num_kv_blocks=100,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=24,
        level=level,
        cudagraph_mode=mode,
        **plain,
    )
    config = dataclasses.replace(config, speculation=speculation)
    return ModelRunner(RankContext(config), **arguments)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[ForwardContext]:
    """The contexts that attention of the first layer found, in order."""
    found: list[ForwardContext] = []
    write = cpu.rope_and_write_kv

    def spy(*args: Any) -> Any:
        context = get_forward_context()
        k_cache = context.kv_cache_data[next(iter(context.no_compile_layers))].k_cache
        if any(each is k_cache for each in args):
            found.append(context)
        return write(*args)

    monkeypatch.setattr(cpu, "rope_and_write_kv", spy)
    return found


def is_padding_of(context: ForwardContext, key: BatchDescriptor, num_seqs: int) -> bool:
    """Return whether a context describes padding of a graph's size and nothing else."""
    step, metadata = context.context, context.attn_metadata
    assert step is not None and isinstance(metadata, AttentionMetadata)
    return (
        step.is_dummy_run
        and (step.batch_size, step.graph_bs) == (num_seqs, num_seqs)
        and step.is_prefill == (not key.uniform_decode)
        and step.positions.tolist() == [0] * key.num_tokens
        and metadata.num_decodes == (num_seqs if key.uniform_decode else 0)
        and len(metadata.slot_mapping) == key.num_tokens
        and len(metadata.seq_lens) == len(metadata.cu_seqlens_q) - 1 == num_seqs
        and not metadata.cu_seqlens_q.any()
        and context.dp_metadata == DPMetadata((key.num_tokens,) * 2)
    )


@pytest.mark.feature("C12")
def test_each_captured_size_runs_in_a_context_of_its_own_which_is_gone_afterwards(
    oracle: Any, seen: list[ForwardContext]
) -> None:
    group = GroupMembership(None, Shard(), dp_rank=1, dp_size=2)
    runner = make_runner(oracle, "FULL", group=group)
    decodes = [BatchDescriptor(bs, bs, True) for bs in GRAPH_BS]
    mixed = [BatchDescriptor(n, min(n, MAX_NUM_SEQS), False) for n in GRAPH_TOKENS]
    wanted = sorted([*decodes, *mixed], key=lambda key: (-key.num_tokens, -(key.num_seqs or 0)))
    at_capture = [i for i, each in enumerate(seen) if each.cudagraph_runtime_mode is FULL]
    keys = dict.fromkeys(seen[i].batch_descriptor for i in at_capture)
    assert list(keys) == wanted == list(runner.forward.num_replays)
    for key in wanted:
        num_seqs = key.num_seqs or 0
        own = [i for i in at_capture if seen[i].batch_descriptor == key]
        assert all(is_padding_of(seen[i], key, num_seqs) for i in own)
        warm_up = seen[own[0] - 1]
        assert (warm_up.cudagraph_runtime_mode, warm_up.batch_descriptor) == (NONE, None)
        assert is_padding_of(warm_up, key, num_seqs)
    assert get_forward_context() == ForwardContext()


@pytest.mark.feature("C12")
def test_the_context_of_a_capture_that_fails_is_gone_too(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cpu.rope_and_write_kv

    def fail(*args: Any) -> Any:
        if get_forward_context().cudagraph_runtime_mode is FULL:
            raise RuntimeError("out of memory")
        return write(*args)

    monkeypatch.setattr(cpu, "rope_and_write_kv", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        make_runner(oracle, "FULL")
    assert get_forward_context() == ForwardContext()
    assert not is_in_capture_window()


@pytest.mark.feature("S04")
def test_a_rank_caches_a_latent_and_a_rotated_key_of_each_token(make_oracle: Any) -> None:
    oracle = make_oracle("deepseek3 groups")
    runner, config = make_runner(oracle, "NONE"), oracle.model.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert runner.kv_spec.layout == f"float32:layers2:kv1:block4:heads1:dim{width}"
    assert runner.kv_pool.nbytes == 101 * 2 * 4 * width * 4


@pytest.mark.feature("L01", "L04")
def test_ops_of_a_served_step_find_the_step_and_the_pool_that_was_allocated_once(
    oracle: Any, seen: list[ForwardContext]
) -> None:
    runner = make_runner(oracle, "NONE")
    pool = runner.kv_pool.untyped_storage().data_ptr()
    engine = assemble_engine(runner.config, runner)
    for name, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8])):
        engine.submit(submit_of(name, prompt, max_tokens=2))
    seen.clear()
    for is_prefill, positions in ((True, [0, 1, 2, 3, 4, 0, 1, 2]), (False, [5, 3])):
        engine.step()
        context = seen[-1]
        assert context.kv_cache_data is seen[0].kv_cache_data
        assert set(context.kv_cache_data) == set(context.no_compile_layers)
        for cache in context.kv_cache_data.values():
            assert cache.k_cache.untyped_storage().data_ptr() == pool
            assert cache.v_cache.untyped_storage().data_ptr() == pool
        step = context.context
        assert step == Context(is_prefill, is_dummy_run=False, batch_size=2, graph_bs=2)
        assert step.positions.tolist() == positions
    assert len(seen) == 2


# --- as all agreed ------------------------------------------------------------------------------


class Votes:
    """The lockstep of one rank; keeps what it was told."""

    def __init__(self, runner: ModelRunner) -> None:
        self._alone = AloneLockstep(runner.switch)
        self.cast: list[Vote] = []

    def agree(self, vote: Vote) -> StepAgreement:
        self.cast.append(vote)
        return self._alone.agree(vote)

    def wait_for_peers(self) -> None:
        self._alone.wait_for_peers()


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[ForwardContext]:
    """The contexts that a rank's forwards ran in, in order."""
    found: list[ForwardContext] = []

    @contextmanager
    def spy(value: ForwardContext) -> Iterator[ForwardContext]:
        found.append(value)
        with forward_context(value):
            yield value

    monkeypatch.setattr(forward, "forward_context", spy)
    return found


@pytest.mark.feature("D05", "N02")
@pytest.mark.parametrize(
    ("mode", "level"),
    [("NONE", 0), ("FULL_DECODE_ONLY", 0), ("FULL", 0), ("FULL_AND_PIECEWISE", 3)],
)
def test_every_step_runs_in_the_mode_and_at_the_size_that_decide_gives_for_its_votes(
    oracle: Any, entered: list[ForwardContext], mode: str, level: int
) -> None:
    runner = make_runner(oracle, mode, level)
    votes = Votes(runner)
    engine = assemble_engine(runner.config, runner, lockstep=votes)
    entered.clear()
    rng = random.Random(mode)
    num_replayed = []
    for i in range(60):
        if i % 5 == 0:
            for j in range(rng.randint(1, 5)):
                prompt = [rng.randrange(200) for _ in range(rng.randint(1, 20))]
                engine.submit(submit_of(f"{i}-{j}", prompt, max_tokens=rng.randint(1, 11)))
        before, num_forwards = counter.num_cudagraph_replayed, len(entered)
        engine.step()
        if len(entered) > num_forwards:
            num_replayed.append(counter.num_cudagraph_replayed - before)
    worked = [vote for vote in votes.cast if vote.has_work]
    assert len(worked) == len(entered) == len(num_replayed) > 30
    num_pieces = len(runner.model.attention_layers()) + 1
    replays = {NONE: 0, PIECEWISE: num_pieces, FULL: 1}
    kinds = set()
    for vote, context, num in zip(worked, entered, num_replayed, strict=True):
        wanted, batch = decide(
            is_uniform_decode=vote.kind is StepKind.DECODE,
            num_tokens=vote.num_tokens,
            num_seqs=vote.num_seqs,
            query_len=vote.max_query_len,
            captured=runner.forward.captured,
        )
        assert (context.cudagraph_runtime_mode, context.batch_descriptor) == (
            wanted,
            batch.graph_key(wanted),
        )
        step = context.context
        assert len(step.positions) == batch.num_tokens
        assert (step.batch_size, step.graph_bs) == (vote.num_seqs, batch.num_seqs or vote.num_seqs)
        assert num == replays[wanted]
        kinds.add((vote.kind, wanted))
    graphs = runner.forward.captured.mode
    assert {(StepKind.DECODE, graphs.decode_mode()), (StepKind.MIXED, graphs.mixed_mode())} <= kinds


@pytest.mark.feature("C07")
def test_a_graph_is_replayed_for_its_batch_size_and_its_query_length_alone(oracle: Any) -> None:
    """Two sequences of two tokens each are as many tokens as four sequences that decode."""
    runner = make_runner(oracle, "FULL_DECODE_ONLY", speculation=SpeculationConfig(1))
    keys = [BatchDescriptor(bs * length, bs, True) for bs in GRAPH_BS for length in (1, 2)]
    assert dict(runner.forward.num_replays) == dict.fromkeys(keys, 0)
    lockstep, wanted = AloneLockstep(runner.switch), Counter[BatchDescriptor]()
    with torch.inference_mode():
        for num_seqs, query_len, num_tokens in ((4, 1, 4), (2, 2, 4), (4, 1, 4), (2, 2, 3)):
            told = vote_of(num_seqs, kind=StepKind.DECODE)
            told = msgspec.structs.replace(told, num_tokens=num_tokens, max_query_len=query_len)
            agreed = lockstep.agree(told)
            assert (agreed.batch.num_tokens, agreed.batch.num_seqs) == (4, num_seqs)
            batch = runner.inputs.dummy(4, num_seqs)
            runner.forward.run(batch, agreed, num_seqs)
            wanted[agreed.batch] += 1
            assert Counter(runner.forward.num_replays) == wanted
    assert wanted == {BatchDescriptor(4, 4, True): 2, BatchDescriptor(4, 2, True): 2}


def pair_of(step: int, computed: int, new: int, output_index: list[int]) -> StepPlan:
    """Return a step of two sequences, both `new` tokens further than `computed`; they draw."""
    rows = (0, 1) if computed == 0 else ()
    filters = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    return plan_of(
        [new] * 2,
        step=step,
        admitted=[admission_of(row, seed=row, **filters) for row in rows],
        new_blocks=[NewBlocks(row, 0, [1 + row]) for row in rows],
        num_computed=[computed] * 2,
        output_index=output_index,
        token_ids=[11 + i for i in range(2 * new)],
    )


@pytest.mark.feature("D02")
def test_a_row_that_samples_nothing_may_come_before_one_that_does_where_a_graph_scores(
    oracle: Any,
) -> None:
    """A prompt that goes on by a token stands among the decodes."""
    drawn = []
    for mode, fields in (("NONE", {}), ("FULL_DECODE_ONLY", {"capture_logits": True})):
        runner = make_runner(oracle, mode, fields=fields)
        lockstep, found = AloneLockstep(runner.switch), list[list[int]]()
        for step, (computed, new, index) in enumerate([(0, 2, [-1, 0]), (2, 1, [-1, 1])]):
            plan = pair_of(step, computed, new, index)
            found.append(runner.execute(plan, lockstep.agree(plan.vote())).token_ids)
        drawn.append(found)
        assert sum(runner.forward.num_replays.values()) == (mode != "NONE")
        runner.close()
    assert drawn[0] == drawn[1] and [len(tokens) for tokens in drawn[0]] == [1, 1]


@pytest.mark.feature("C10", "P05")
@pytest.mark.parametrize("scores", [False, True])
def test_a_graph_needs_room_for_the_logits_that_it_scores(
    oracle: Any, monkeypatch: pytest.MonkeyPatch, scores: bool
) -> None:
    largest = GRAPH_BS[-1]
    model = ModelConfig.from_dir(oracle.path)
    token_bytes = bytes_per_token(model, "float32") + scores * 8 * model.vocab_size
    needed = MARGIN_BYTES + largest * token_bytes
    for free, sizes in ((needed, GRAPH_BS), (needed - 1, GRAPH_BS[:-1])):
        monkeypatch.setattr(forward, "free_memory_bytes", lambda device, free=free: free)
        runner = make_runner(oracle, "FULL_DECODE_ONLY", fields={"capture_logits": scores})
        assert runner.forward.captured.batch_sizes == sizes
        # What no captured graph holds is padded to none.
        agreed = AloneLockstep(runner.switch).agree(vote_of(3))
        wanted = (FULL.value, 4) if largest in sizes else (NONE.value, 3)
        assert (agreed.mode, agreed.batch.num_seqs) == wanted
        runner.close()


@pytest.mark.feature("X01")
@pytest.mark.parametrize("sealed", ["strict", "warn"])
def test_a_rank_that_is_ready_captures_nothing_more(oracle: Any, sealed: str) -> None:
    """Even if it is told to replay what no rank has captured."""
    runner = make_runner(oracle, "FULL_DECODE_ONLY", fields={"sealed": sealed})
    agreed = AloneLockstep(runner.switch).agree(vote_of(4))
    agreed = msgspec.structs.replace(agreed, batch=BatchDescriptor(3, 3, True))
    batch = runner.inputs.dummy(3, 3)
    with torch.inference_mode():
        if sealed == "strict":
            with pytest.raises(LateCapture, match=r"num_tokens=3"):
                runner.forward.run(batch, agreed, 3)
        else:
            runner.forward.run(batch, agreed, 3)
    assert {key.num_seqs for key in runner.forward.num_replays} == set(GRAPH_BS)
