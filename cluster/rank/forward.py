"""A rank's forward: compiled, captured, and run the way that a step's agreement decides.

1. `compile` runs the model once on padding: a module that compiles itself does it now.
2. `capture` records the graphs that the configuration wants, largest first, and seals the process.
3. If the rank is to serve while it compiles and the cache lacks its pieces, steps run as the model
   is written, and the rest is left to the stages of a `CompileSwitch`, entered between steps.
4. `run` runs a step as all ranks agreed: a full graph, piecewise graphs, or the model itself. No
   rank looks at anything of its own to decide which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from cluster.engine.compile_switch import CompileSwitch
from cluster.group.context import Progress
from cluster.group.membership import GroupMembership
from cluster.rank.free_memory import MARGIN_BYTES, free_memory_bytes
from cluster.rank.inputs import StepBatch, StepInputs
from cluster.rank.mtp import MTPForward
from cluster.wire.messages import MAX_LOGPROBS, StepAgreement, checksum
from compile.cache.builds import install_for_kernels
from compile.cache.inductor import import_runtime
from compile.config import CompilationConfig, CompilationLevel, CUDAGraphMode
from compile.context import (
    BatchDescriptor,
    Context,
    DPMetadata,
    ForwardContext,
    KVCacheTensor,
    forward_context,
)
from compile.dispatch import CapturedGraphs
from compile.environment import is_compile_cache_disabled
from compile.graphs.capture import (
    CaptureCase,
    CaptureReport,
    capture_all,
    capture_trials,
    estimate_graph_bytes,
    graphs_to_capture,
    joined,
    seal,
    unseal,
    warmups_of,
)
from compile.graphs.pools import GraphPools
from compile.graphs.wrapper import CUDAGraphWrapper, wrap_forward
from compile.pieces.decorator import compile_as_is
from model.kernels.drawing import likeliest
from model.layers.decoder import CausalLM
from model.sampler import costliest_sampling, sample, score

NUM_TRACED_TOKENS = 8
"""Tokens that a forward is traced on, at least; tracing takes 0 and 1 for special."""
NUM_LOADED_TOKENS = 1
MAX_SCORED_ROWS = 256
"""Prompt tokens whose logits exist at once: 130 MB for a vocabulary of 128,000."""
_MISSING, _FOUND = 1, 2
"""What a rank finds of its compiled forward; 0 if it has no cache."""


class Scored(NamedTuple):
    """What a graph found of every row of a decode step, padding included. Both are None on ranks
    that do not sample, and written again by the next step."""

    logits: torch.Tensor | None
    """float32 [T, V]"""
    likeliest: torch.Tensor | None
    """int64 [T]"""


class StepOutput(NamedTuple):
    hidden: torch.Tensor
    """[T, E], padded"""
    context: ForwardContext
    scored: Scored | None = None
    """None if the step replayed no graph that scores."""


class StepForward:
    """The model's forward with its graphs. Invariant: inputs come from one `StepInputs`, whose
    addresses graphs rely on; `switch`, and so `captured`, is equal on all ranks of the group."""

    def __init__(
        self,
        model: CausalLM,
        inputs: StepInputs,
        config: CompilationConfig,
        *,
        group: GroupMembership,
        pools: GraphPools,
        token_bytes: int = 0,
    ) -> None:
        """`model` was built in the scope of `config`; a graph takes `token_bytes` a token."""
        self.config = config
        self._token_bytes = token_bytes
        self._num_asked = 0
        self._model = model
        self.switch = CompileSwitch()
        """At its end, unless `compile` leaves something to do while the rank serves."""
        self.report: CaptureReport | None = None
        self._reports: list[CaptureReport] = []
        self.num_piecewise_steps = 0
        self._piecewise_s = self._replayed_s = 0.0
        self._layers = model.attention_layers()
        self._inputs = inputs
        self._group = group
        self._pools = pools
        self._kv_cache_data: dict[str, KVCacheTensor] = {}
        is_as_is = config.level == CompilationLevel.DYNAMO_AS_IS
        self._call = wrap_forward(compile_as_is(model) if is_as_is else model, config, pools)
        self.mtp: MTPForward | None = None
        if model.mtp is not None:
            self.mtp = MTPForward(model, inputs, group, pools)
        self._score: CUDAGraphWrapper | None = None
        if config.capture_logits and config.graph_mode.decode_mode() is CUDAGraphMode.FULL:
            full = CUDAGraphMode.FULL
            self._score = CUDAGraphWrapper(self._score_rows, full, pools, trims_pool=False)

    @property
    def num_replays(self) -> dict[BatchDescriptor, int]:
        """How often each full graph was replayed."""
        call = self._call
        if isinstance(call, CUDAGraphWrapper) and call.mode is CUDAGraphMode.FULL:
            return dict(call.num_replays)
        return {}

    @property
    def captured(self) -> CapturedGraphs:
        return self.switch.captured

    def checksum(self) -> int:
        """Return what is equal on ranks that dispatch over the same graphs in the same modes, or
        will once they have gone over to them."""
        return checksum(str((self.captured, self.switch.last_stage)))

    def set_kv_cache_data(self, kv_cache_data: dict[str, KVCacheTensor]) -> None:
        """Attend to these KV caches, by layer, from now on. Graphs keep those they captured."""
        self._kv_cache_data = kv_cache_data

    # --- before the rank is ready ---

    @torch.inference_mode()
    def compile(self, max_num_tokens: int, progress: Progress | None = None) -> None:
        """Run the model once on padding, which traces and compiles it, or loads what was. If the
        rank serves while it compiles, and not all ranks find what was compiled, the model runs as
        it is written, and `switch` has stages left."""
        unseal()
        is_compiled = self.config.level != CompilationLevel.NO_COMPILATION
        if progress is not None and is_compiled:
            progress("compiling", 0, 1)
        batch = self._inputs.dummy(self._num_traced_tokens(max_num_tokens), 1)
        with forward_context(self._context(batch, 1, is_dummy_run=True)):
            if self._is_deferred():
                self._defer()
            elif is_compiled:
                self._backbone.prepare(batch.input_ids, batch.positions)
            # A rank that finds everything in the cache gets here long before one that compiles.
            self._group.barrier("compiled")
            self._call(batch.input_ids, batch.positions)
        if self._inputs.device.type == "cuda":
            install_for_kernels()
            self.run_sizes()
        if progress is not None and is_compiled:
            progress("compiling", 1, 1)

    @torch.inference_mode()
    def prepare(self, max_num_tokens: int) -> None:
        batch = self._inputs.dummy(self._num_traced_tokens(max_num_tokens), 1)
        with forward_context(self._context(batch, 1, is_dummy_run=True)):
            self._backbone.prepare(batch.input_ids, batch.positions)

    def _num_traced_tokens(self, max_num_tokens: int) -> int:
        """Return how many tokens of padding the forward is traced on: on a GPU, whose kernels
        Inductor tunes on as many, the middle one of the captured sizes."""
        num_tokens = NUM_TRACED_TOKENS
        sizes = self.config.cudagraph_capture_sizes
        if self._inputs.device.type == "cuda" and sizes:
            num_tokens = max(num_tokens, sizes[len(sizes) // 2])
        return min(num_tokens, max_num_tokens)

    @property
    def _backbone(self) -> Any:
        """The module that is compiled; its decorator adds what mypy does not see."""
        return self._model.model

    def _is_deferred(self) -> bool:
        has_pieces = self.config.level >= CompilationLevel.DYNAMO_ONCE
        if self.config.serve_while_compiling != "on" or not has_pieces:
            return False
        can_be_left = not is_compile_cache_disabled()
        if can_be_left:
            for _ in self.loading():
                pass
        found = _FOUND if self._backbone.is_compiled else int(can_be_left)
        return self._group.all_reduce_min("found", found) == _MISSING

    def _defer(self) -> None:
        import_runtime()  # a rank that serves would stand still meanwhile
        self._backbone.run_as_written(True)
        shard = self._group.shard
        self.switch = CompileSwitch(
            last_stage=1 + len(self._cases()), num_followers=0 if shard.rank else shard.size - 1
        )

    def loading(self) -> Iterator[None]:
        """Load what another process has compiled, a piece at a time. Call it between steps: it
        fills the static inputs with padding."""
        batch = self._inputs.dummy(NUM_LOADED_TOKENS, 1)
        yield from self._backbone.loading(batch.input_ids, batch.positions)

    @property
    def is_loaded(self) -> bool:
        return bool(self._backbone.is_compiled)

    @torch.inference_mode()
    def enter(self, stage: int) -> None:
        """Enter the stage that all ranks agreed on: all at once, as graphs may hold collectives."""
        if stage == 1:
            self._backbone.run_as_written(False)
        else:
            self._reports.append(self._capture([self._cases()[stage - 2]]))
        is_last = stage == self.switch.last_stage
        self.switch.enter(stage, self._end_captures() if is_last else None)

    @torch.inference_mode()
    def run_sizes(self) -> None:
        """Run on padding what a GPU has kernels of its own for: decode steps and prompts of 1, 2,
        4, ... and of all, and each number of tokens that pieces were compiled for. The last one's
        tokens are sampled by every filter."""
        decodes = _doubling(self._inputs.max_num_seqs)
        listed = (size for size in self.config.compile_sizes or () if isinstance(size, int))
        prompts = sorted({*_doubling(self._inputs.max_num_batched_tokens), *listed})
        for num_tokens, num_seqs in [*((n, n) for n in decodes), *((n, 1) for n in prompts)]:
            hidden = self._run_padding(num_tokens, num_seqs)
        for num_rows in (1, 2):
            self._sample_costliest(hidden[:num_rows])

    @torch.inference_mode()
    def time_step(self, max_num_tokens: int) -> tuple[int, float]:
        """Run a small step on padding once more, all ranks at once; return tokens and seconds."""
        num_tokens = min(NUM_TRACED_TOKENS, max_num_tokens)
        self._synchronize()
        self._group.barrier("timed")
        began = time.monotonic()
        self._run_padding(num_tokens, 1)
        self._synchronize()
        return num_tokens, time.monotonic() - began

    @torch.inference_mode()
    def run_largest(self, max_num_tokens: int, progress: Progress | None = None) -> int:
        """Run the largest step on padding, scored and sampled by every rule and filter; return the
        bytes of a CUDA device that it needs. They are released: trials of graphs may empty the
        allocator's cache at any time."""
        device = self._inputs.device
        is_on_cuda = device.type == "cuda"
        if is_on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device) if is_on_cuda else 0
        if progress is not None:
            progress("measuring the largest step", 0, 1)
        hidden = self._run_padding(max_num_tokens, 1)
        self._score_costliest(hidden[:MAX_SCORED_ROWS])
        self._sample_costliest(hidden[: self._inputs.max_num_sampled])
        self._synchronize()
        if not is_on_cuda:
            return 0
        del hidden
        needed = torch.cuda.max_memory_reserved(device) - before
        torch.cuda.empty_cache()
        return needed

    def _run_padding(self, num_tokens: int, num_seqs: int) -> torch.Tensor:
        """Run the model on padding alone; return hidden states [T, E]."""
        batch = self._inputs.dummy(num_tokens, num_seqs)
        with forward_context(self._context(batch, num_seqs, is_dummy_run=True)):
            hidden: torch.Tensor = self._call(batch.input_ids, batch.positions)
            if self.mtp is not None:
                self.mtp.run_padding(batch, hidden)
        return hidden

    def _score_costliest(self, hidden: torch.Tensor) -> None:
        """Score rows as a prompt's are that wants the most logprobs. hidden: [B, E]."""
        logits = self._model.compute_logits(hidden)
        if logits is not None:
            score(logits, logits.argmax(dim=-1), MAX_LOGPROBS)

    def _sample_costliest(self, hidden: torch.Tensor) -> None:
        logits = self._model.compute_logits(hidden)
        if logits is not None:
            num_rows, vocab_size = logits.shape
            sample(logits, costliest_sampling(num_rows, vocab_size, logits.device))

    def close(self) -> None:
        """Let go of all graphs. NCCL ends no group while a graph lives that talks over it."""
        self._pools.forget_graphs()

    @property
    def taken_bytes(self) -> int:
        """What graphs hold, except what the device keeps outside of the pools."""
        return self._pools.num_bytes

    @torch.inference_mode()
    def graph_bytes(self) -> int:
        """Return what to leave free for graphs: the largest are captured for trial, and dropped."""
        trials = capture_trials(
            self._cases(),
            self._run_case,
            pools=self._pools,
            warmups=warmups_of(self.config),
            synchronize=self._synchronize,
            used_bytes=self._used_bytes,
        )
        return estimate_graph_bytes(trials, policy=self.config.graph_pool)

    def capture(self, progress: Progress | None = None) -> None:
        cases = self._cases()
        if cases:
            self._group.barrier("allocated")
            reported = None if progress is None else partial(progress, "capturing graphs")
            self._reports.append(self._capture(cases, reported))
        self.switch = CompileSwitch(self._end_captures())

    def _capture(
        self, cases: list[CaptureCase], progress: Callable[[int, int], None] | None = None
    ) -> CaptureReport:
        return capture_all(
            cases,
            self._run_case,
            rank=self._group.rank,
            pools=self._pools,
            warmups=warmups_of(self.config),
            synchronize=self._synchronize,
            fits_on_all_ranks=self._fits_on_all_ranks,
            progress=progress,
        )

    def _end_captures(self) -> CapturedGraphs:
        seal(self.config.sealed)
        if not self._reports:
            return CapturedGraphs()
        report = self.report = joined(self._reports)
        return CapturedGraphs(
            self.config.graph_mode,
            batch_sizes=report.batch_sizes,
            draft_batch_sizes=report.draft_batch_sizes,
            query_len=self._inputs.query_len,
            token_counts=report.token_counts,
            mixed=report.mixed,
            enable_padding=self.config.enable_padding,
        )

    def _cases(self) -> list[CaptureCase]:
        return [
            CaptureCase(mode, key, partial(self._capture_context, key))
            for mode, key in graphs_to_capture(
                self.config, self._inputs.max_num_seqs, self._inputs.query_len
            )
        ]

    def _capture_context(self, key: BatchDescriptor) -> ForwardContext:
        return self._context(self._padding(key), key.num_seqs or 1, is_dummy_run=True)

    def _run_case(self, case: CaptureCase) -> Any:
        batch = self._padding(case.descriptor)
        hidden = self._call(batch.input_ids, batch.positions)
        if self._score is not None and case.descriptor.uniform_decode:
            self._score(hidden)
        if self.mtp is not None and case.mode is CUDAGraphMode.FULL:
            self.mtp.run_padding(batch, hidden)
        return hidden

    def _fits_on_all_ranks(self, key: BatchDescriptor) -> bool:
        """Wait for all ranks; return whether a graph fits on each: else all skip it."""
        needed = MARGIN_BYTES + key.num_tokens * self._token_bytes
        if self._score is not None and key.uniform_decode:
            # Logits as the product gives them, which may be float32 too, and in float32.
            each = 2 * torch.float32.itemsize
            needed += key.num_tokens * self._model.config.vocab_size * each
        self._num_asked += 1
        free = free_memory_bytes(self._inputs.device)
        return self._group.all_reduce_min(f"free/{self._num_asked}", free) >= needed

    def _score_rows(self, hidden: torch.Tensor) -> Scored:
        """hidden: [T, E]"""
        logits = self._model.compute_logits(hidden)
        return Scored(logits, None if logits is None else likeliest(logits))

    def _padding(self, key: BatchDescriptor) -> StepBatch:
        """Return a batch of a graph's size; equal keys lie at equal addresses."""
        is_mixed = key.num_seqs is not None and key.has_chunks
        return self._inputs.dummy(key.num_tokens, key.num_seqs or 1, is_mixed=is_mixed)

    def _synchronize(self) -> None:
        if self._inputs.device.type == "cuda":
            torch.cuda.synchronize(self._inputs.device)

    def _used_bytes(self) -> int:
        if self._inputs.device.type != "cuda":
            return self._pools.num_bytes
        free, total = torch.cuda.mem_get_info(self._inputs.device)
        return total - free

    # --- in a step ---

    def run(self, batch: StepBatch, agreed: StepAgreement, num_seqs: int) -> StepOutput:
        """Run a padded batch of `num_seqs` real sequences, or none."""
        mode = CUDAGraphMode(agreed.mode)
        is_full = mode is CUDAGraphMode.FULL
        context = self._context(
            batch,
            num_seqs,
            mode,
            agreed.batch.graph_key(mode),
            is_dummy_run=not num_seqs,
            num_tokens_across_dp=agreed.num_tokens_across_dp,
        )
        if mode is CUDAGraphMode.PIECEWISE:
            return StepOutput(self._run_pieces(batch, context), context)
        with forward_context(context):
            hidden: torch.Tensor = self._call(batch.input_ids, batch.positions)
            if self._score is None or not (is_full and agreed.batch.uniform_decode and num_seqs):
                return StepOutput(hidden, context)
            return StepOutput(hidden, context, self._score(hidden))

    def draft(
        self, batch: StepBatch, agreed: StepAgreement, output: StepOutput, drawn: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the MTP layer behind a step, if there is one, on all ranks; return the draft tokens
        of each sequence that drew, int64 [D, drafts] on rank 0, or None where nothing is drafted.
        drawn: int64 [N]"""
        if self.mtp is None:
            return None
        return self.mtp.draft(batch, agreed, output.hidden, drawn, output.context, self.captured)

    def _run_pieces(self, batch: StepBatch, context: ForwardContext) -> torch.Tensor:
        """Run a step of replayed pieces, and note how much of its host time they take. The rest is
        spent between them, in prefill by attention. On a GPU a replay takes as long as its
        launch."""

        replayed_s = 0.0

        def replay(part: Callable[[], None]) -> None:
            nonlocal replayed_s
            began = time.perf_counter()
            part()
            replayed_s += time.perf_counter() - began

        began = time.perf_counter()
        with forward_context(replace(context, replay=replay)):
            hidden: torch.Tensor = self._call(batch.input_ids, batch.positions)
        self.num_piecewise_steps += 1
        # A step that fails is not booked. Other threads read the share at any time.
        self._piecewise_s += time.perf_counter() - began
        self._replayed_s += replayed_s
        return hidden

    @property
    def eager_gap_share(self) -> float:
        """The share of piecewise steps that is spent between their pieces."""
        return 1 - self._replayed_s / self._piecewise_s if self._piecewise_s else 0.0

    def _context(
        self,
        batch: StepBatch,
        num_seqs: int,
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
        key: BatchDescriptor | None = None,
        *,
        is_dummy_run: bool = False,
        num_tokens_across_dp: Sequence[int] | None = None,
    ) -> ForwardContext:
        padded = batch.attention.seq_lens.shape[0]
        dp_metadata: DPMetadata | None = None
        if (dp_size := self._group.dp_size) > 1:
            num_tokens = batch.input_ids.shape[0]
            # Before the rank is ready all ranks run the same padding.
            across = num_tokens_across_dp or (num_tokens,) * dp_size
            dp_metadata = DPMetadata.make(across, self._group.dp_rank, num_tokens)
        return ForwardContext(
            no_compile_layers=self._layers,
            attn_metadata=batch.attention,
            kv_cache_data=self._kv_cache_data,
            context=Context(
                is_prefill=batch.attention.num_decodes < padded
                and not (key is not None and key.uniform_decode),
                is_dummy_run=is_dummy_run,
                batch_size=num_seqs,
                graph_bs=padded,
                positions=batch.positions,
            ),
            dp_metadata=dp_metadata,
            adapters=batch.adapters,
            spec_decode_metadata=batch.spec_decode_metadata,
            batch_descriptor=key,
            cudagraph_runtime_mode=mode,
        )


def _doubling(most: int) -> list[int]:
    return sorted({most, *(2**i for i in range(most.bit_length()))})
