"""The runner: one rank's model, KV pool and static inputs, executing plans on any rank."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cluster.engine.blocks import check_num_blocks
from cluster.engine.sequence import SampledTokens
from cluster.engine.step_stats import StepStats
from cluster.group.context import Progress, RankContext
from cluster.group.membership import GroupMembership
from cluster.rank.buffers import upload_array, upload_once
from cluster.rank.compile_process import CompileAhead, CompileJob
from cluster.rank.compiling import graph_pools, rank_scope
from cluster.rank.forward import MAX_SCORED_ROWS, StepForward, StepOutput
from cluster.rank.free_memory import available_memory_bytes, bytes_per_token
from cluster.rank.inputs import StepBatch, StepInputs
from cluster.wire.messages import PromptTargets, StepAgreement, StepPlan, TokenLogprobs
from compile.config import CompilationConfig, CUDAGraphMode
from compile.counters import counter
from compile.errors import FieldError
from compile.scope import compile_scope
from model.adapters import load_adapters
from model.config import ModelConfig
from model.kv_cache import KVCacheSpec
from model.parallel import Shard
from model.sampler import SamplerOutput, sample, score
from model.weights import load_model

if TYPE_CHECKING:
    from cluster.grammar.masks import GrammarMasks

log = logging.getLogger("lockstep.rank")
Logits = Callable[[torch.Tensor], torch.Tensor | None]
"""[N, E] to [N, V] on rank 0, None on others: a collective, which all call equally often."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that a rank has begun. What it drew is on the host once `ended` has happened."""

    step: int
    drawn: SamplerOutput | None
    drafts: torch.Tensor | None
    """int64 [D, drafts of each]"""
    wants_logprobs: list[int]
    prompt_logprobs: list[list[TokenLogprobs]]
    ended: torch.cuda.Event | None
    """None on a CPU, where a step has ended when its launch returns."""


class ModelRunner:
    """Executes plans on one rank. Invariant: the pool has `num_blocks` blocks for sequences behind
    block 0, and behind those what rows need for drafts."""

    def __init__(
        self,
        context: RankContext,
        *,
        group: GroupMembership | None = None,
        storage: Callable[[int], memoryview | None] | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Load the model, compile it, allocate the KV pool and capture graphs. `storage` returns
        memory of so many bytes for the pool; `wake` wakes the step thread."""
        config, progress = context.config, context.progress
        group = group or GroupMembership(None, Shard())
        self.shard = group.shard
        self._dp_rank = group.dp_rank
        self.step_stats = StepStats(time.monotonic)
        wake = wake or (lambda: None)
        self.grammars: GrammarMasks | None = None
        if self.shard.rank == 0:
            self.grammars = _grammars(context, wake)
        self._step_bytes = 0
        self.config = config
        self.device = torch.device(context.device.name)
        if config.device == "cuda":
            # Kernels are launched on the current device. Any other thread's is this one as well.
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(context.threads)
            if config.dtype == "float16":
                log.warning("dtype: float16 is slow on a CPU: bfloat16 and float32 have kernels")
        limits, pools = config.scheduler, graph_pools(config.compilation, self.device)
        with compile_scope(rank_scope(context, group, pools)) as scope:
            self.model, self.model_config = load_model(
                Path(config.model_path),
                shard=self.shard,
                dtype=getattr(torch, config.dtype),
                device=self.device,
                progress=None if progress is None else partial(progress, "loading weights"),
                has_fp8_kv=config.cache.dtype == "fp8",
                quantization=config.quantization,
                has_mtp=config.cache.has_mtp,
            )
            slots = (config.num_lora_slots, config.max_lora_rank)
            self.adapters = load_adapters(self.model, config.lora_paths, *slots)
        num_data_ranks = 1 if self.shard.data is None else self.shard.data.size
        token_bytes = bytes_per_token(self.model_config, config.dtype, num_data_ranks)
        layers = self.model.attention_layers()
        first = next(iter(layers.values()))
        self.kv_spec = KVCacheSpec(
            num_layers=len(layers),
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            block_size=config.cache.block_size,
            dtype=getattr(torch, config.kv_dtype),
            has_values=first.has_values,
        )
        self.inputs = StepInputs(config, self.model_config.vocab_size, self.device)
        self.forward = StepForward(
            self.model, self.inputs, scope.config, group=group, pools=pools, token_bytes=token_bytes
        )
        # Compiling runs on padding, which lies in the scratch block: there is no pool yet, since
        # its size follows from the memory that a forward leaves.
        scratch = self.kv_spec.allocate(0, self.device)
        self.forward.set_kv_cache_data(self.kv_spec.views(scratch, list(layers)))
        self.forward.compile(limits.max_num_batched_tokens, progress)
        # Otherwise the first long prompt would look like a rank that is stuck.
        self.step_stats.learn(*self.forward.time_step(limits.max_num_batched_tokens))
        graph_bytes = self._graph_bytes(scope.config, progress)
        # Ranks may find different amounts of memory, but a block exists on all of them or on none.
        self.num_blocks = group.all_reduce_min("num_blocks", self._num_blocks(graph_bytes))
        self.inputs.first_draft_block = self.num_blocks + 1
        num_blocks = self.num_blocks + self._num_draft_blocks
        size = (num_blocks + 1) * self.kv_spec.block_bytes
        self.kv_pool = self.kv_spec.allocate(
            num_blocks, self.device, storage=storage(size) if storage else None
        )
        self.forward.set_kv_cache_data(self.kv_spec.views(self.kv_pool, list(layers)))
        self._ahead: CompileAhead | None = None
        if self.forward.switch.is_over:
            self.forward.capture(progress)
        else:
            job = CompileJob.of(context, group)
            self._ahead = CompileAhead(job, self.forward, wake, context.exchange)
        self.switch = self.forward.switch
        if graph_bytes:
            log.info("graphs: %d bytes reserved, %d taken", graph_bytes, self.forward.taken_bytes)

    def load_piece(self) -> None:
        if self._ahead is not None:
            self._ahead.load_piece()

    @property
    def compile_progress(self) -> tuple[str, int, int] | None:
        """What is compiled or captured while the rank serves; None if nothing is."""
        return None if self._ahead is None else self._ahead.progress

    @property
    def compile_error(self) -> str:
        return "" if self._ahead is None else self._ahead.error

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()
        if self._ahead is not None:
            self._ahead.close()
        self.forward.close()

    def execute(
        self,
        plan: StepPlan,
        agreed: StepAgreement,
        wait_for_peers: Callable[[], None] | None = None,
    ) -> SampledTokens:
        return self.wait(self.launch(plan, agreed, wait_for_peers))

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        agreed: StepAgreement,
        wait_for_peers: Callable[[], None] | None = None,
    ) -> LaunchedStep:
        """Run the plan's batch, or a dummy one; return what `wait` makes the sampled tokens of. The
        agreement fixes the forward's collectives on all ranks, the plan those that gather logits on
        its tensor-parallel ranks: one for each piece of scored prompt, and one if a sequence is
        sampled. Rank 0 samples; others learn the tokens from the next plan, or by a broadcast if
        that may be made ahead of them. A CUDA device runs the step after this has returned, unless
        it scores a prompt."""
        if agreed.stage != self.switch.stage:
            self.step_stats.build(agreed.step, 0)
            if wait_for_peers is not None:
                wait_for_peers()
                wait_for_peers = None
            self.step_stats.run(agreed.step)  # a graph that is captured may hold collectives
            self.forward.enter(agreed.stage)
        num_padding = get_dp_padding(agreed, self._dp_rank)
        self.step_stats.build(agreed.step, plan.num_tokens + num_padding)
        batch = self.build(plan, agreed)
        if wait_for_peers is not None:
            wait_for_peers()
        self.step_stats.begin(plan, agreed, num_padding)
        output = self.forward.run(batch, agreed, plan.num_seqs)
        prompt: list[list[TokenLogprobs]] = []
        if plan.prompt_targets:
            prompt = prompt_logprobs(self.model.compute_logits, output.hidden, plan)
        drawn = self._draw(output, batch, plan) if batch.wants_logprobs else None
        drafts: torch.Tensor | None = None
        if self.config.cache.has_mtp:
            known = batch.sampled_rows.new_empty(0) if drawn is None else drawn.token_ids
            drafts = self.forward.draft(batch, agreed, output, known)
        ended: torch.cuda.Event | None = None
        if self.device.type == "cuda":
            drawn = None if drawn is None else on_host(drawn)
            drafts = None if drafts is None else drafts.to("cpu", non_blocking=True)
            # Recorded for a step that draws nothing too: the host arrays that its copies read are
            # filled again.
            ended = torch.cuda.Event()
            ended.record()
        else:
            self.step_stats.end_step(agreed.step)
        return LaunchedStep(agreed.step, drawn, drafts, batch.wants_logprobs, prompt, ended)

    def wait(self, launched: LaunchedStep) -> SampledTokens:
        """Wait until a launched step has ended, and return what it sampled in batch order."""
        if launched.ended is not None:
            has_ended = launched.ended.query()
            self.step_stats.run(launched.step)
            launched.ended.synchronize()
            self.step_stats.end_step(launched.step, is_seen=not has_ended)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if launched.drawn is not None:
            token_ids, logprobs = to_lists(launched.drawn, launched.wants_logprobs)
        return SampledTokens(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=launched.prompt_logprobs,
            drafts=[] if launched.drafts is None else launched.drafts.tolist(),
        )

    def _draw(self, output: StepOutput, batch: StepBatch, plan: StepPlan) -> SamplerOutput | None:
        logits, known = self._logits(output, batch, plan)
        sampling, drawn = batch.sampling, None
        if logits is not None:
            grammars = self.grammars
            if grammars is not None and grammars.filled_step == plan.step:
                masks = grammars.take().view("int32")
                sampling = replace(sampling, allowed=upload_array(masks, self.device))
            drawn = sample(logits, sampling, known)
        if not (self.config.overlap or self.config.cache.has_mtp):
            return drawn
        if drawn is None:
            drawn = SamplerOutput(torch.empty_like(batch.sampled_rows), None, None, None, None)
        self.shard.broadcast(drawn.token_ids)
        if self.config.overlap:
            self.inputs.keep_drawn(batch, drawn.token_ids)
        return drawn

    def _logits(
        self, output: StepOutput, batch: StepBatch, plan: StepPlan
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the sampled rows' logits, and their likeliest tokens if a graph found them. Which
        of the two ways it goes follows from agreement and plan: one of them is a collective."""
        if output.scored is None:
            return self.model.compute_logits(output.hidden[batch.logits_index]), None
        logits, likeliest = output.scored
        if logits is None or likeliest is None:
            return None, None
        num_sampled = len(batch.wants_logprobs)
        has_all = num_sampled == plan.num_tokens
        # The tokens are copied: an overlapped step replays the graph before they are read.
        known = likeliest[batch.logits_index]
        return (logits[:num_sampled] if has_all else logits[batch.logits_index]), known

    def build(self, plan: StepPlan, agreed: StepAgreement) -> StepBatch:
        """Return the plan's batch, or a dummy one, padded as all ranks agreed."""
        num_tokens = agreed.num_tokens_across_dp[self._dp_rank]
        num_seqs = agreed.batch.num_seqs or max(plan.num_seqs, 1)
        is_full = agreed.mode == CUDAGraphMode.FULL.value
        is_mixed = is_full and agreed.batch.has_chunks
        if not plan.num_seqs:
            return self.inputs.dummy(num_tokens, num_seqs, is_mixed=is_mixed)
        return self.inputs.build(plan, num_tokens, num_seqs, is_mixed=is_mixed)

    def debug(self) -> dict[str, Any]:
        """Return what was compiled, captured, replayed and agreed on; any thread may ask."""
        forward = self.forward
        return {
            "compilations": counter.num_backend_compilations,
            "cpp_builds": counter.num_cpp_builds,
            "triton_builds": counter.num_triton_builds,
            "compiled_ahead": {} if self._ahead is None else self._ahead.built,
            "loaded": counter.num_compiled_artifacts_loaded,
            "captures": counter.num_cudagraph_captured,
            "captured": {
                "full": forward.captured.batch_sizes,
                "piecewise": forward.captured.token_counts,
                "bytes": forward.taken_bytes,
            },
            "late_compilations": counter.num_late_compilations,
            "late_captures": counter.num_late_captures,
            "replays": {str(key): times for key, times in forward.num_replays.items()},
            "piecewise_steps": forward.num_piecewise_steps,
            "eager_gap_share": round(forward.eager_gap_share, 4),
            "agreements": self.step_stats.as_dicts(),
        }

    def _graph_bytes(self, compilation: CompilationConfig, progress: Progress | None) -> int:
        """Return what the KV cache leaves for graphs: nothing if its size was given."""
        is_on_cuda = self.device.type == "cuda"
        if is_on_cuda and not self.config.cache.num_kv_blocks:
            self._step_bytes = self.forward.run_largest(
                self.config.scheduler.max_num_batched_tokens, progress
            )
        is_reserved = compilation.reserve_graph_memory
        if is_reserved is None:
            is_reserved = is_on_cuda and not self.config.cache.num_kv_blocks
        return self.forward.graph_bytes() if is_reserved else 0

    def _num_blocks(self, graph_bytes: int) -> int:
        given = self.config.cache.num_kv_blocks
        num_blocks = given or (
            self.kv_spec.num_blocks_for(self._kv_memory_bytes(graph_bytes))
            - self._num_draft_blocks
            - 1
        )
        check_num_blocks(self.config, self.model_config.kv_window, num_blocks)
        # Four times every row at its longest: more than the prefix cache and handoffs make use of.
        useful = self.config.max_blocks_per_seq * self.config.scheduler.max_num_seqs * 4
        return given or min(num_blocks, useful)

    @property
    def _num_draft_blocks(self) -> int:
        return self.config.draft_blocks * self.config.scheduler.max_num_seqs

    def _kv_memory_bytes(self, graph_bytes: int) -> int:
        if self.device.type == "cpu":
            wanted, available = self.config.cache.kv_memory_bytes, available_memory_bytes()
            if wanted > available - graph_bytes:
                of_them = f", {graph_bytes} of them for graphs" if graph_bytes else ""
                found = f"at most the {available} bytes that are available{of_them}"
                raise FieldError("kv_memory", found, wanted)
            return wanted
        torch.cuda.empty_cache()  # of graphs that were captured for trial
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * self.config.cache.gpu_memory_utilization)
        return allowed - (total - free) - self._step_bytes - graph_bytes


def _grammars(context: RankContext, wake: Callable[[], None]) -> GrammarMasks | None:
    """Return what compiles grammars; without their library requests that have one are refused."""
    if importlib.util.find_spec("llguidance") is None:
        log.warning("llguidance is not installed: requests with a grammar are refused")
        return None
    from cluster.grammar.compile import vocabulary_of
    from cluster.grammar.masks import GrammarMasks

    path = Path(context.config.model_path)
    vocabulary = vocabulary_of(path, ModelConfig.from_dir(path).vocab_size)
    return GrammarMasks(vocabulary, num_threads=context.threads, wake=wake)


def get_dp_padding(agreed: StepAgreement, dp_rank: int) -> int:
    """Return how many tokens of padding a rank runs (ATOM's name; it asks by an all-reduce)."""
    return agreed.num_tokens_across_dp[dp_rank] - agreed.num_scheduled_tokens[dp_rank]


def on_host(output: SamplerOutput) -> SamplerOutput:
    """Return copies on the host of samples on a CUDA device, which come when it gets there."""
    parts = (output.token_ids, output.logprobs, output.ranks)
    likeliest = (output.top_token_ids, output.top_logprobs)
    # PyTorch takes pinned memory for copies that do not wait.
    token_ids, *others = (
        None if part is None else part.to("cpu", non_blocking=True) for part in (*parts, *likeliest)
    )
    assert token_ids is not None
    return SamplerOutput(token_ids, *others)


def to_lists(
    output: SamplerOutput, wants_logprobs: list[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return samples as token ids, and logprobs aligned with them or empty; wait for a device."""
    token_ids = output.token_ids.tolist()
    if output.logprobs is None:
        return token_ids, []
    assert output.ranks is not None
    assert output.top_token_ids is not None
    assert output.top_logprobs is not None
    columns = zip(
        output.logprobs.tolist(),
        output.ranks.tolist(),
        output.top_token_ids.tolist(),
        output.top_logprobs.tolist(),
        strict=True,
    )
    logprobs = [
        TokenLogprobs(logprob, rank, ids[:wanted], values[:wanted]) if wanted >= 0 else None
        for wanted, (logprob, rank, ids, values) in zip(wants_logprobs, columns, strict=True)
    ]
    return token_ids, logprobs


def prompt_logprobs(
    compute_logits: Logits, hidden: torch.Tensor, plan: StepPlan
) -> list[list[TokenLogprobs]]:
    """Return the log-probabilities of the plan's prompt targets, on rank 0. hidden: [T, E]."""
    starts = [0, *accumulate(plan.num_new)]
    return [
        _score_prompt(compute_logits, hidden[starts[targets.index] :], targets)
        for targets in plan.prompt_targets
    ]


def _score_prompt(
    compute_logits: Logits, hidden: torch.Tensor, targets: PromptTargets
) -> list[TokenLogprobs]:
    """hidden: [at least as many as targets, E]"""
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets.token_ids), MAX_SCORED_ROWS):
        token_ids = targets.token_ids[start : start + MAX_SCORED_ROWS]
        logits = compute_logits(hidden[start : start + len(token_ids)])
        if logits is None:
            continue
        wanted = upload_once(token_ids, torch.int64, logits.device)
        scored = score(logits, wanted, targets.num_logprobs)
        _, logprobs = to_lists(scored, [targets.num_logprobs] * len(token_ids))
        found += [entry for entry in logprobs if entry is not None]
    return found
