"""Bugs to plant, one at a time: each is a slip that the tests named beside it must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One planted bug. Invariant: each text that it replaces stands in its file exactly once."""

    claim: str
    """What is broken; no two say the same."""
    path: str
    """Of the file, from the repository's root."""
    edits: dict[str, str]
    """By the text that is there what takes its place."""
    tests: tuple[str, ...]
    """Files or tests of which at least one must fail."""


REPLAYED = "tests/cluster/parity/test_matrix.py::test_row[six_heads-run_down-O0_FULL]"
REPLAYED_IN_PIECES = (
    "tests/cluster/parity/test_matrix.py::test_row[six_heads-run_down-O3_PIECEWISE]"
)
KERNELS, FP8_KV = "tests/model/kernels/test_kernels.py", "tests/model/test_fp8_kv.py"
FORWARD = "tests/cluster/rank/test_forward.py"
MATRIX_DRAFTS = "tests/cluster/parity/test_matrix.py::test_row[six_heads-drafted-3_drafts]"
MATRIX_MTP = "tests/cluster/parity/test_matrix.py::test_row[deepseek3_mtp-{}-mtp]"
MTP = "tests/cluster/rank/test_mtp.py"
TRACES = "tests/cluster/engine/test_random_traces.py"
AHEAD = "tests/serve/test_llm_overlap.py"
WIRED = "tests/serve/test_wired.py"
SIMULATED = "tests/simulation/test_simulation.py::test_no_schedule_hangs_or_loses_a_token"
PREFIXES = "tests/serve/pools/test_prefix_routing.py"
SCALING = "tests/serve/pools/test_scaling.py"
ADAPTERS = "tests/cluster/actors/test_adapter_set.py"
LOADING = "tests/serve/test_adapter_loading.py"
REPLICAS = "tests/serve/test_app.py::test_a_pool_is_deployed_with_its_replicas"


def replaced(argument: str) -> dict[str, str]:
    """Return the edit by which the HTTP layer has this argument, whatever was asked for."""
    replace = "__import__('msgspec').structs.replace"
    settings = f"{replace}(config.api, args={replace}(config.args, {argument}))"
    return {"            config.api, self,": f"            {settings}, self,"}


MUTATIONS = (
    Mutation(
        "A slot keeps what its last adapter had where the next one has nothing (S10).",
        "model/adapters.py",
        {"                layer.clear_slot(slot)\n": ""},
        ("tests/model/test_adapters.py",),
    ),
    Mutation(
        "A slot is given away while a step in flight computes who had its adapter (S10).",
        "cluster/engine/scheduler.py",
        {"self._handover.held, *self._in_flight.values())": "self._handover.held)"},
        ("tests/cluster/engine/test_adapters.py",),
    ),
    Mutation(
        "The process that compiles reserves no room for adapters (S10).",
        "cluster/rank/compile_process.py",
        {"config.lora_paths, config.num_lora_slots, config.max_lora_rank": "config.lora_paths"},
        (
            "tests/cluster/rank/test_adapters.py::"
            "test_what_is_compiled_while_a_rank_serves_has_room_for_adapters",
        ),
    ),
    Mutation(
        "A plan made ahead holds the last token known to the host, not the one drawn now (T04).",
        "cluster/engine/sequence.py",
        {"PENDING if seq.num_pending_tokens": "seq.token_ids[-1] if seq.num_pending_tokens"},
        (TRACES, AHEAD),
    ),
    Mutation(
        "A sequence that has ended gives up its blocks while a step in flight computes it (T04).",
        "cluster/engine/scheduler.py",
        {"return seq.last_step in self._in_flight": "return False"},
        (TRACES,),
    ),
    Mutation(
        "The prefix cache is offered blocks that a step in flight computes (T04).",
        "cluster/engine/blocks.py",
        {"min(seq.num_confirmed_tokens,": "min(seq.num_computed_tokens,"},
        (TRACES,),
    ),
    Mutation(
        "A sequence is computed once more although its pending token is its last (T04).",
        "cluster/engine/scheduler.py",
        {"seq.num_pending_tokens >= seq.max": "seq.num_pending_tokens > seq.max"},
        (TRACES, AHEAD),
    ),
    Mutation(
        "That handed over KV was read is told with the next token alone (P17).",
        "cluster/engine/scheduler.py",
        {"                self._emit(seq, FinishReason.NONE)\n": ""},
        ("tests/cluster/engine/test_handoff.py",),
    ),
    Mutation(
        "Penalties count tokens before those that the host did not know are in place (T04).",
        "cluster/rank/inputs.py",
        {
            "        if pending is not None:\n": (
                "        if counted is not None:\n"
                "            self._rules.count(counted, batch.input_ids)\n"
                "        if pending is not None:\n"
            ),
            "        if counted is not None:\n"
            "            self._rules.count(counted, batch.input_ids)\n"
            "        return batch\n": "        return batch\n",
        },
        (AHEAD,),
    ),
    Mutation(
        "Sizes are captured smallest first, so larger ones find no memory to use again.",
        "compile/graphs/capture.py",
        {"-key.num_tokens, -(key.num_seqs or 0)": "key.num_tokens, key.num_seqs or 0"},
        ("tests/compile/graphs/test_capture.py",),
    ),
    Mutation(
        "An artifact is loaded without comparing its content with its name.",
        "compile/cache/artifacts.py",
        {"if (found := hashlib.sha256(data).hexdigest()) != name:": "if not (found := name):"},
        ("tests/compile/cache/test_artifacts.py", "tests/compile/cache/test_cache.py"),
    ),
    Mutation(
        "A piece that was compiled for exactly this number of tokens is not chosen.",
        "compile/pieces/piecewise.py",
        {"if count in self.runnables:\n            return": "if False:\n            return"},
        ("tests/compile/pieces/test_piecewise.py",),
    ),
    Mutation(
        "A replay on a CPU sees host values of now, which a CUDA graph would not.",
        "compile/graphs/cpu/recorder.py",
        {'= self.freeze(value, "forward context")': "= value"},
        (
            "tests/compile/graphs/cpu/test_graphs.py",
            "tests/compile/graphs/test_wrapper.py",
            "tests/model/test_step_graph.py",
        ),
    ),
    Mutation(
        "The key of the cache does not say which passes rewrote the code.",
        "compile/cache/key.py",
        {
            "for name in KEYED_FIELDS}": 'for name in KEYED_FIELDS if name != "passes"}',
            'factors["compilation.passes"] +=': "_ =",
        },
        ("tests/compile/cache/test_key.py",),
    ),
    Mutation(
        "Equal layers have different keys, so each one is compiled.",
        "compile/pieces/split.py",
        {"sha256(text.encode())": 'sha256(f"{id(graph)} {text}".encode())'},
        ("tests/compile/pieces/test_split.py", "tests/compile/pieces/test_backend.py"),
    ),
    Mutation(
        "A pool frees a block that is still held.",
        "compile/graphs/cpu/pool.py",
        {"memory(block)\n": "memory(block)\n        self._arena.release(block)\n"},
        ("tests/compile/graphs/cpu/test_graphs.py", "tests/compile/graphs/cpu/test_arena.py"),
    ),
    Mutation(
        "A graph is replayed although its input lies elsewhere.",
        "compile/graphs/wrapper.py",
        {"if addresses != entry.addresses:": "if len(addresses) != len(entry.addresses):"},
        ("tests/compile/graphs/test_wrapper.py",),
    ),
    Mutation(
        "Padding of a decode step keeps the lengths of an earlier step's sequences.",
        "cluster/rank/inputs.py",
        {"self._seq_lens.host[num_seqs:end_seqs] = 0": "pass"},
        ("tests/cluster/rank/test_inputs.py",),
    ),
    Mutation(
        "A step replays the next smaller graph.",
        "compile/dispatch.py",
        {"at = bisect_left(sizes, wanted)": "at = max(0, bisect_left(sizes, wanted) - 1)"},
        ("tests/compile/test_dispatch.py",),
    ),
    Mutation(
        "The fused norm hands on its norm in place of the residual's sum.",
        "compile/passes/fuse_add_rms_norm.py",
        {"(fused, i)) for i in range(2)]": "(fused, 0)) for _ in range(2)]"},
        ("tests/compile/passes/test_passes.py",),
    ),
    Mutation(
        "Splitting ops that follow one another no longer share one eager piece.",
        "compile/pieces/split.py",
        {"if current not in eager:": "if True:"},
        ("tests/compile/pieces/test_split.py",),
    ),
    Mutation(
        "Steps run eagerly although their graphs were captured.",
        "cluster/rank/forward.py",
        {"cudagraph_runtime_mode=mode,": "cudagraph_runtime_mode=CUDAGraphMode.NONE,"},
        (REPLAYED,),
    ),
    Mutation(
        "Pieces are captured, and run eagerly in every step (B02, B05, B07, N02).",
        "compile/graphs/wrapper.py",
        {
            "if context.cudagraph_runtime_mode is not self.mode:": (
                "if context.cudagraph_runtime_mode is not self.mode or not (\n"
                "            self.mode is CUDAGraphMode.FULL or is_in_capture_window()\n"
                "        ):"
            )
        },
        (REPLAYED_IN_PIECES,),
    ),
    Mutation(
        "Full graphs of mixed steps are captured and never replayed (B03, Q02).",
        "compile/dispatch.py",
        {"return _full_mixed(num_tokens, num_seqs, captured) or eager": "return eager"},
        (REPLAYED,),
    ),
    Mutation(
        "A full graph of mixed steps is captured with decodes, whose number it freezes (B03).",
        "cluster/rank/inputs.py",
        {"num_tokens == num_seqs and not is_mixed": "num_tokens == num_seqs"},
        (REPLAYED,),
    ),
    Mutation(
        "A strictly sealed process runs what it did not capture without a word.",
        "compile/graphs/capture.py",
        {'raise LateCapture("capture", "none after the process was sealed", what)': "return"},
        ("tests/compile/graphs/test_capture.py", "tests/compile/graphs/test_wrapper.py"),
    ),
    Mutation(
        "A rank that is ready still compiles and captures (X01).",
        "cluster/rank/forward.py",
        {"seal(self.config.sealed)": "pass"},
        (FORWARD,),
    ),
    Mutation(
        "A rank that captures does not tell how far it is (C04).",
        "cluster/rank/forward.py",
        {'None if progress is None else partial(progress, "capturing graphs")': "None"},
        ("tests/cluster/rank/test_free_memory.py",),
    ),
    Mutation(
        "A rank captures without asking whether all ranks have the memory (P05).",
        "cluster/rank/forward.py",
        {"fits_on_all_ranks=self._fits_on_all_ranks,": ""},
        (FORWARD,),
    ),
    Mutation(
        "A rank looks for room for graphs while others have yet to allocate their KV (P05).",
        "cluster/rank/forward.py",
        {'            self._group.barrier("allocated")\n': ""},
        ("tests/cluster/rank/test_free_memory.py",),
    ),
    Mutation(
        "A forward that raises leaves its context behind (C12, L02).",
        "compile/context.py",
        {"    try:\n        yield value\n    finally:\n    ": "    yield value\n"},
        (FORWARD,),
    ),
    Mutation(
        "Every graph is captured on a batch of one padded sequence, whatever its key (C12).",
        "cluster/rank/forward.py",
        {"dummy(key.num_tokens, key.num_seqs or 1,": "dummy(key.num_tokens, 1,"},
        (FORWARD,),
    ),
    Mutation(
        "A forward's context does not say where its tokens stand (L01).",
        "cluster/rank/forward.py",
        {"                positions=batch.positions,\n": ""},
        (FORWARD,),
    ),
    Mutation(
        "Attention writes into a copy of the pool that is read when KV changes hands (L04).",
        "cluster/rank/runner.py",
        {"views(self.kv_pool, list(layers))": "views(self.kv_pool.clone(), list(layers))"},
        (FORWARD,),
    ),
    Mutation(
        "A rank pads to its own sequences in place of the graph that all agreed on (D05).",
        "cluster/rank/runner.py",
        {"agreed.batch.num_seqs or max(plan.num_seqs, 1)": "max(plan.num_seqs, 1)"},
        (FORWARD,),
    ),
    Mutation(
        "Graphs of equal tokens are one key, however many each sequence has (C07).",
        "compile/dispatch.py",
        {
            "return self\n": (
                "return BatchDescriptor(self.num_tokens, self.num_tokens, self.uniform_decode)\n"
            )
        },
        (f"{FORWARD}::test_a_graph_is_replayed_for_its_batch_size_and_its_query_length_alone",),
    ),
    Mutation(
        "Every token that was drawn behind a draft is kept (T05).",
        "cluster/engine/scheduler.py",
        {"num_kept = 1 + next(wrong, len(draft))": "num_kept = 1 + len(draft)"},
        ("tests/cluster/engine/test_random_traces.py", MATRIX_DRAFTS),
    ),
    Mutation(
        "What was computed for a wrong draft counts as computed (T05).",
        "cluster/engine/scheduler.py",
        {"seq.num_computed_tokens -= 1 + len(draft) - num_kept": "pass"},
        ("tests/cluster/engine/test_random_traces.py", MATRIX_DRAFTS),
    ),
    Mutation(
        "Tokens behind a draft are drawn with the draw of its first one (T05).",
        "cluster/rank/inputs.py",
        {"output_index[sampled] + num_drawn[sampled] - from_end": "output_index[sampled]"},
        (MATRIX_DRAFTS, "tests/serve/test_llm_overlap.py"),
    ),
    Mutation(
        "Penalties do not see the draft before a token (T05).",
        "cluster/rank/row_rules.py",
        {"drafted=self._pairs(drafted) if drafted else None": "drafted=None"},
        (MATRIX_DRAFTS, "tests/serve/test_llm_overlap.py"),
    ),
    Mutation(
        "Penalties do not see a draft that was right once it is behind (T05).",
        "cluster/rank/row_rules.py",
        {"        if counted.accepted:": "        if False:"},
        (MATRIX_DRAFTS, "tests/serve/test_llm_overlap.py"),
    ),
    Mutation(
        "A grammar's masks behind a draft are those in front of it (T05).",
        "cluster/engine/scheduler.py",
        {"seq.masked_row(num_rows, drafts.get(i, []))": "seq.masked_row(num_rows, [])"},
        ("tests/serve/requests/test_structured.py::test_drafts_are_checked_against_the_grammar",),
    ),
    Mutation(
        "The MTP layer runs on the step's tokens in place of those behind them (T05, D04).",
        "model/layers/decoder.py",
        {
            "input_ids if metadata is None else metadata.token_ids_behind(input_ids, drawn)": (
                "input_ids"
            )
        },
        (MTP,),
    ),
    Mutation(
        "The MTP layer looks at the second token of a sequence (S04).",
        "model/layers/decoder.py",
        {"(positions == 0).unsqueeze(-1)": "(positions < 0).unsqueeze(-1)"},
        (MATRIX_MTP.format("everything-2_drafts"),),
    ),
    Mutation(
        "At a chunk's end the MTP layer takes the next sequence's token for the one behind (T05).",
        "compile/context.py",
        {"        behind[self.known_indices] = self.known_token_ids\n": ""},
        (MATRIX_MTP.format("everything-2_drafts"),),
    ),
    Mutation(
        "A rank without work does not run the MTP layer (T05, P04).",
        "cluster/rank/runner.py",
        {
            "        if self.config.cache.has_mtp:\n            known": (
                "        if self.config.cache.has_mtp and plan.num_seqs:\n            known"
            )
        },
        (MATRIX_MTP.format("drafted-1x2-O0_FULL_DECODE_ONLY-3_drafts"),),
    ),
    Mutation(
        "Followers run the MTP layer without knowing what was drawn (T05).",
        "cluster/rank/runner.py",
        {"self.shard.broadcast(drawn.token_ids)": "self.config.overlap and drawn"},
        (MATRIX_MTP.format("drafted-2x1-O0_FULL_DECODE_ONLY-2_drafts"),),
    ),
    Mutation(
        "Further drafts stay where the first one is (T05, D04).",
        "cluster/rank/mtp.py",
        {"        positions.add_(1)\n": ""},
        (MATRIX_MTP.format("everything-2_drafts"),),
    ),
    Mutation(
        "A graph of further drafts is replayed with what the step before left in it (T05, C07).",
        "cluster/rank/mtp.py",
        {"                static[:num].copy_(values)\n": "                pass\n"},
        (MATRIX_MTP.format("drafted-O0_FULL-scored-2_drafts"),),
    ),
    Mutation(
        "The MTP layer runs eagerly behind a step that replays (T05, D04, C07).",
        "cluster/rank/mtp.py",
        {
            "if context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE:": (
                "if context.cudagraph_runtime_mode is not CUDAGraphMode.NONE:"
            )
        },
        (MATRIX_MTP.format("drafted-O0_FULL-scored-2_drafts"),),
    ),
    Mutation(
        "Each rank runs further drafts in its own size where all replay one (T05, P04).",
        "cluster/rank/mtp.py",
        {
            "most = max(across)": "most = across[self._group.dp_rank]",
        },
        (MATRIX_MTP.format("drafted-1x2-O0_FULL_DECODE_ONLY-3_drafts"),),
    ),
    Mutation(
        "Further drafts are written where block 0 lies, for all rows alike (T05).",
        "cluster/rank/runner.py",
        {"self.inputs.first_draft_block = self.num_blocks + 1": "pass"},
        (MATRIX_MTP.format("everything-2_drafts"), MATRIX_MTP.format("seeded-3_drafts")),
    ),
    Mutation(
        "A cached block is found whatever token is behind it where KV follows from that (T05).",
        "cluster/engine/blocks.py",
        {"end = (i + 1) * size + self._num_behind": "end = (i + 1) * size"},
        ("tests/cluster/engine/test_blocks.py", MTP),
    ),
    Mutation(
        "next_pow2 loses the last of its six steps (J05).",
        "compile/pieces/shapes.py",
        {"(1, 2, 4, 8, 16, 32)": "(1, 2, 4, 8, 16)"},
        ("tests/compile/pieces/test_dynamic_shapes.py::test_next_pow2_is_exact",),
    ),
    Mutation(
        "A forward is traced without a word about what makes a graph for each size (J05).",
        "compile/pieces/decorator.py",
        {"for hazard in recompile_hazards(forward):": "for hazard in ():"},
        ("tests/compile/pieces/test_dynamic_shapes.py",),
    ),
    Mutation(
        "A rank whose experts' tokens have all travelled counts none for the next chunk (P03).",
        "compile/context.py",
        {"max(1, min(max_chunk, n - before))": "max(0, min(max_chunk, n - before))"},
        ("tests/model/test_moe.py", "tests/cluster/rank/test_dp_metadata.py"),
    ),
    Mutation(
        "Experts' tokens travel in one chunk, however many there are (P03).",
        "model/layers/moe.py",
        {
            "range(-(-metadata.max_tokens_across_dp // CHUNK_TOKENS))": (
                "range(min(1, metadata.max_tokens_across_dp))"
            ),
            "metadata.chunked_sizes(CHUNK_TOKENS, index)": "metadata.chunked_sizes(1 << 30, index)",
            "rows[CHUNK_TOKENS * index :][:CHUNK_TOKENS]": "rows",
        },
        ("tests/model/test_moe.py",),
    ),
    Mutation(
        "A collective on a GPU waits as long as torch's default.",
        "cluster/group/membership.py",
        {"Options()\n    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)": "Options()"},
        ("tests/cluster/group/test_membership.py",),
    ),
    Mutation(
        "While a graph is captured, an event that NCCL's watchdog polls is an error.",
        "compile/graphs/cuda.py",
        {', capture_error_mode="thread_local"': ""},
        ("tests/compile/graphs/test_cuda_graph.py",),
    ),
    Mutation(
        "An op at which a capture ends attends to the batch that was captured (X03).",
        "compile/graphs/cpu/recorder.py",
        {"if name in self._breaks:": "if not name:"},
        ("tests/cluster/parity/test_matrix.py::test_row[six_heads-run_down-O0_PIECEWISE]",),
    ),
    Mutation(
        "A sum over ranks is not fused with the norm behind it (O02).",
        "compile/passes/fuse_all_reduce_rms_norm.py",
        {"return graph_pass.rewrite(graph, NORMS, _can_replace, _replace)": "return 0"},
        (
            "tests/cluster/parity/test_compiled_start.py::"
            "test_two_ranks_sum_and_norm_in_one_op_without_a_compiler",
        ),
    ),
    Mutation(
        "A norm of which numbers are made is quantized by an op of its own (O03).",
        "compile/passes/fuse_rms_norm_quantize.py",
        {"return is_by_index and is_named and": "return not is_named and"},
        (
            "tests/compile/passes/test_passes.py::"
            "test_a_norm_and_what_quantizes_it_are_one_op[torch-float32-quantized-fused_add_rms_norm_fp8]",
        ),
    ),
    Mutation(
        "Numbers of FP4 that are as near two others are rounded away from zero (O04).",
        "compile/passes/quantizers.py",
        {"(size * 2).round()": "(size * 2 + 0.5).floor()"},
        (
            "tests/model/test_nvfp4.py::"
            "test_every_bfloat16_is_rounded_to_the_nearest_number_and_ties_to_even",
        ),
    ),
    Mutation(
        "Two that make FP4 numbers of a norm, each by its own scale, get one's numbers (O04).",
        "compile/passes/fuse_rms_norm_quantize.py",
        {
            "if operation(user) == operation(quantized)": (
                "if operation(user).kind == operation(quantized).kind"
            )
        },
        (
            "tests/compile/passes/test_passes.py::"
            "test_a_norm_and_what_makes_fp4_of_it_are_one_op[aten-float32-by_two_scales-ops2]",
        ),
    ),
    Mutation(
        "The inputs of FP8 weights are rounded by one scale for all tokens (S08).",
        "compile/passes/quantizers.py",
        {"wide.abs().amax(-1, keepdim=True)": "wide.abs().amax().expand(*x.shape[:-1], 1)"},
        (
            "tests/model/test_integers.py::"
            "test_fp8_products_are_those_of_rounded_weights_and_inputs[dtype0-True]",
        ),
    ),
    Mutation(
        "Experts on a GPU round their tokens' FP4 blocks by another expert's scale (S08).",
        "model/kernels/triton/rounding.py",
        {"tl.load(experts + pair) - first_expert": "0"},
        (
            "tests/model/kernels/test_triton.py::"
            "test_kernels_equal_their_torch_references[nvfp4_experts]",
        ),
    ),
    Mutation(
        "On a GPU a chunk's latents see what is before the chunk, or themselves, not both (S04).",
        "model/kernels/triton/latent_chunks.py",
        {"acc * own_weight[:, None] + before * weight[:, None]": "acc * own_weight[:, None]"},
        (
            "tests/model/kernels/test_triton.py::"
            "test_kernels_equal_their_torch_references[latent_prefill]",
        ),
    ),
    Mutation(
        "Tokens of a draft attend to the latents of those behind themselves (S04, T05).",
        "model/kernels/latent_attention.py",
        {"seq_lens[of_token] - (cu_seqlens_q[of_token + 1] - 1 - tokens)": "seq_lens[of_token]"},
        (
            "tests/model/kernels/test_kernels.py::"
            "test_a_layer_attends_to_latents_and_zeroes_padding[100-1]",
        ),
    ),
    Mutation(
        "All 128 inputs of an FP8 product are scaled as the first ones (S08).",
        "model/kernels/triton/fp8.py",
        {"x_scales + rows * GROUPS + group": "x_scales + rows * GROUPS"},
        (
            "tests/model/kernels/test_triton.py::"
            "test_kernels_equal_their_torch_references[fp8_linear]",
        ),
    ),
    Mutation(
        "A scale that is a number is refused where one of a list would be read (S08).",
        "model/weights.py",
        {
            "if shape != stored.shape and (shape or stored.shape != (1,)):": (
                "if shape != stored.shape:"
            )
        },
        (
            "tests/model/test_quantization.py::"
            "test_weights_are_what_their_tensors_mean_to_the_bit[AutoFP8-Llama]",
        ),
    ),
    Mutation(
        "FP8 numbers of a checkpoint get the scales of other outputs (S08).",
        "model/kernels/scaled_linear.py",
        {"self.scales[:, outputs].copy_(": "self.scales[:, : len(numbers)].copy_("},
        ("tests/model/test_fp8_groups.py::test_each_of_two_ranks_holds_its_part_to_the_bit",),
    ),
    Mutation(
        "The board of artifacts is placed among a replica's ranks, where it cannot be (P12).",
        "cluster/actors/artifact_board.py",
        {', scheduling_strategy="DEFAULT"': ""},
        (
            "tests/cluster/actors/test_artifact_board.py::"
            "test_nodes_fetch_what_one_of_them_compiles[True-3]",
        ),
    ),
    Mutation(
        "Ops of pieces that no compiler sees write into copies (O07).",
        "compile/passes/manager.py",
        {"        reinplace(found.graph, storages)\n": ""},
        (
            "tests/cluster/parity/test_compiled_start.py::"
            "test_two_ranks_sum_and_norm_in_one_op_without_a_compiler",
        ),
    ),
    Mutation(
        "A residual of which each rank has its rows leaves a piece as it is (O05).",
        "compile/passes/user_buffers.py",
        {"if any(not _reads_own_rows(user, part, node) for user in part.users):": "if False:"},
        (
            "tests/cluster/parity/test_compiled_start.py::"
            "test_ranks_add_up_where_their_products_were_written",
        ),
    ),
    Mutation(
        "The columns of an AWQ word are taken in order (S08).",
        "model/stored_weights.py",
        {"_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)": "_AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)"},
        ("tests/model/test_quantization.py::test_a_quantized_checkpoint_is_served",),
    ),
    Mutation(
        "A cut through a group of inputs that share a scale is read (S08).",
        "model/stored_weights.py",
        {"            tensor.where(cut)\n": "            pass\n"},
        ("tests/model/test_quantization.py",),
    ),
    Mutation(
        "A product is not written where the other ranks read it (O05).",
        "compile/passes/user_buffers.py",
        {"    for node in sums:\n        _move_product(graph, node)\n": ""},
        (
            "tests/cluster/parity/test_compiled_start.py::"
            "test_ranks_add_up_where_their_products_were_written",
        ),
    ),
    Mutation(
        "What runs where a replica stops is waited for until its ranks are killed (P17).",
        "serve/pools/directory.py",
        {'if report.state == "stopping":': 'if report.state == "never":'},
        (
            "tests/serve/pools/test_directory.py::"
            "test_what_runs_where_a_replica_stops_goes_on_elsewhere_at_once",
        ),
    ),
    Mutation(
        "Suspects wait one by one for a leader that went before their turns (P09).",
        "serve/pools/router.py",
        {"if not history.is_suspect or self._directory.has_leaders(adapter_id):": "if True:"},
        (
            "tests/serve/pools/test_router.py::"
            "test_suspects_whose_leader_goes_before_their_turn_wait_for_another_at_once",
        ),
    ),
    Mutation(
        "What a replica runs leaves for a leader that has stopped (P17).",
        "serve/pools/directory.py",
        {" if each.report.engine_id in reported]": "]"},
        ("tests/serve/pools/test_directory.py",),
    ),
    Mutation(
        "What a piece was tuned to is not kept (Q07).",
        "compile/cache/inductor.py",
        {"            if tuned:\n": "            if False:\n"},
        (
            "tests/compile/pieces/test_tuning.py::"
            "test_a_size_is_tuned_by_the_first_start_and_later_ones_read_what_it_found",
        ),
    ),
    Mutation(
        "Passes run in Inductor alone.",
        "compile/cache/manager.py",
        {"graph = self.passes.apply(graph, inputs)": "pass"},
        (
            "tests/cluster/parity/test_compiled_start.py::"
            "test_passes_rewrite_pieces_that_no_compiler_sees",
        ),
    ),
    Mutation(
        "A forward that is refused for its graph break leaves nothing to explain (Q04).",
        "compile/pieces/decorator.py",
        {"PiecewiseCompiler(self._scope, self.tag, files).report_break(error)\n": "pass\n"},
        ("tests/compile/test_explain.py",),
    ),
    Mutation(
        "A report says of conditions that every call checks that none does (Q04, J01).",
        "compile/pieces/backend.py",
        {"keeps_guards = self.scope.config.evaluate_guards": "keeps_guards = False"},
        ("tests/compile/test_explain.py",),
    ),
    Mutation(
        "A pre-empted sequence waits behind those that came after it (T03).",
        "cluster/engine/scheduler.py",
        {
            "seq.forget_computed()\n        insort(self._waiting, seq, key=_ARRIVAL)": (
                "seq.forget_computed()\n        self._waiting.append(seq)"
            )
        },
        ("tests/cluster/engine/test_scheduler.py",),
    ),
    Mutation(
        "A read of KV leaves no block for the running sequences to grow into (T03).",
        "cluster/engine/scheduler.py",
        {"return len(self.running) + len(self._ready) + self._handover.num_reading": "return 0"},
        ("tests/cluster/engine/test_handoff.py",),
    ),
    Mutation(
        "While a rank is silent, one that waits for it is taken for stuck (P09).",
        "cluster/engine/watchdog.py",
        {"None if silent_s[longest] > STALE_AFTER_S else self._stuck": "self._stuck"},
        ("tests/cluster/engine/test_watchdog.py",),
    ),
    Mutation(
        "Ranks that decode together are not padded to one size (P03, P04).",
        "cluster/engine/lockstep.py",
        {"if kind is StepKind.DECODE or mode is not CUDAGraphMode.NONE:": "if False:"},
        ("tests/cluster/engine/test_lockstep.py",),
    ),
    Mutation(
        "A rank without work takes part in no collective of a step (P03).",
        "cluster/engine/lockstep.py",
        {"max(num_tokens, int(has_work))": "num_tokens"},
        ("tests/cluster/engine/test_lockstep.py",),
    ),
    Mutation(
        "The votes of all ranks but the first for their number of tokens are dropped (P04).",
        "cluster/engine/lockstep.py",
        {"num_tokens=max(scheduled),": "num_tokens=scheduled[0],"},
        ("tests/cluster/engine/test_lockstep.py",),
    ),
    Mutation(
        "An ended KV read is told to the client as the end of its answer.",
        "serve/pools/router.py",
        {"    FinishReason.KV_LOST,\n    FinishReason.DIED,": "    FinishReason.DIED,"},
        (SIMULATED,),
    ),
    Mutation(
        "A connection ends, and what ran over it waits for ever.",
        "serve/pools/directory.py",
        {"running = [*self._running.items()]": "running = [*self._running.items()][:0]"},
        (SIMULATED,),
    ),
    Mutation(
        "A leader is chosen before it has answered, or after its connection has ended.",
        "serve/pools/directory.py",
        {"return self._is_welcome and self.report.state == state": "return True"},
        (SIMULATED,),
    ),
    Mutation(
        "A leader is chosen that drains.",
        "serve/pools/directory.py",
        {
            "return self._is_welcome and self.report.state == state": (
                'return self._is_welcome and self.report.state in ("ready", "draining")'
            )
        },
        (SIMULATED,),
    ),
    Mutation(
        "A leader whose connection was cut is not connected to again.",
        "serve/pools/directory.py",
        {"known is not None and not known.is_lost and report.epoch": "known and report.epoch"},
        (SIMULATED,),
    ),
    Mutation(
        "What runs leaves for a successor that gives it other tokens (X08).",
        "serve/pools/directory.py",
        {"if not can_serve or report.pool": "if report.pool"},
        ("tests/serve/pools/test_directory.py",),
    ),
    Mutation(
        "An engine holds KV that its successor cannot read (X08).",
        "cluster/engine/scheduler.py",
        {"if self._is_prefill or seq.leaves_kv:": "if True:"},
        ("tests/cluster/engine/test_leaving.py",),
    ),
    Mutation(
        "A decode engine is handed KV of other blocks than its own (X08).",
        "serve/pools/directory.py",
        {"stage, request_id = self._as_taken(stage), ": "stage, request_id = stage, "},
        ("tests/serve/pools/test_router.py",),
    ),
    Mutation(
        "A late report of an epoch that is over ends the connection to the next one.",
        "serve/pools/directory.py",
        {"if known is not None and report.epoch < known.report.epoch:": "if False:"},
        (SIMULATED,),
    ),
    Mutation(
        "Nobody tells an engine that a client has left.",
        "serve/pools/directory.py",
        {"        self._aborts.append(request_id)\n": ""},
        (SIMULATED,),
    ),
    Mutation(
        "A request waits for KV whose holder is gone until its reader gives up.",
        "serve/pools/directory.py",
        {"self._handed_over[output.request_id] = taken.to": "pass"},
        (SIMULATED,),
    ),
    Mutation(
        "A leader runs on what an ingress asked for that has left.",
        "cluster/rank/leader.py",
        {"self.engine.scheduler.abort(lost)": "pass"},
        (SIMULATED,),
    ),
    Mutation(
        "A replica that drains does not wait for what runs there.",
        "serve/pools/pool_core.py",
        {"EMPTY_REPORTS = 4\n": "EMPTY_REPORTS = 0\n"},
        (SIMULATED,),
    ),
    Mutation(
        "The application is built without its keys (R18).",
        "serve/ingress_core.py",
        replaced("api_keys=''"),
        (WIRED,),
    ),
    Mutation(
        "An ingress lets as many sequences wait as come (R13).",
        "serve/ingress_core.py",
        {"max_queued=max_queued,": "max_queued=1 << 30,"},
        (WIRED,),
    ),
    Mutation(
        "A pool's first leader is chosen for every request (P08).",
        "serve/pools/chooser.py",
        {"return max(equal, key=lambda i: _rank(request_id, offers[i].engine_id))": "return 0"},
        (WIRED, PREFIXES),
    ),
    Mutation(
        "A leader gets a request however much more than others it has queued (P08).",
        "serve/pools/chooser.py",
        {"if queue_s[i] > MAX_QUEUE_TIMES * mean_s + num_tokens * prompt_s[i]:": "if False:"},
        ("tests/serve/pools/test_chooser.py",),
    ),
    Mutation(
        "A prompt is computed where it decodes, whatever the sequences there lose by it (R21).",
        "serve/pools/chooser.py",
        {" + decode[i].num_beside * decode[i].uncached_tokens * prompt_s[i]": ""},
        ("tests/serve/pools/test_chooser.py", "tests/serve/pools/test_on_decode.py"),
    ),
    Mutation(
        "A transfer that was slow once is never measured again (R21).",
        "serve/pools/directory.py",
        {"            self._token_s.clear()\n": "            pass\n"},
        ("tests/serve/pools/test_on_decode.py",),
    ),
    Mutation(
        "What an ingress has just submitted is not expected to be cached there (P08).",
        "serve/pools/leader_load.py",
        {
            "return prefix in self._prefixes or prefix in self._expected": (
                "return prefix in self._prefixes"
            )
        },
        (PREFIXES,),
    ),
    Mutation(
        "An ingress does not hear what is cached where (P08).",
        "serve/pools/leader_load.py",
        {"self._prefixes.apply(report.prefixes)": "pass"},
        (PREFIXES,),
    ),
    Mutation(
        "A pool has one replica, however many it is configured with (R01, R21).",
        "serve/app.py",
        {'"num_replicas": pool.replicas': '"num_replicas": 1'},
        (REPLICAS, WIRED),
    ),
    Mutation(
        "A load that does not change moves a pool up and down (R16).",
        "serve/pools/scaling.py",
        {"enough = LOW * min(n - 1": "enough = 1.3 * min(n - 1"},
        (SCALING,),
    ),
    Mutation(
        "The largest body is that of the default (R12, R22).",
        "serve/ingress_core.py",
        replaced("max_body_bytes=8 << 20"),
        (WIRED,),
    ),
    Mutation(
        "All who come through HAProxy are one client.",
        "serve/ingress.py",
        {"is_peer_known=not self._is_behind_haproxy": "is_peer_known=True"},
        ("tests/serve/openai/test_access.py",),
    ),
    Mutation(
        "Bytes are held up to a multiple of the default's largest body (R12, R22).",
        "serve/ingress_core.py",
        {"=args.max_body_bytes,\n            retry": "=8 << 20,\n            retry"},
        (WIRED,),
    ),
    Mutation(
        "A request may take as long as by default (R12, R22).",
        "serve/ingress_core.py",
        replaced("request_timeout_s=600.0"),
        (WIRED,),
    ),
    Mutation(
        "The largest answer is that of the default (R12, R22).",
        "serve/ingress_core.py",
        replaced("max_answer_bytes=64 << 20"),
        (WIRED,),
    ),
    Mutation(
        "What a handle asks to complete is read as a conversation (R03).",
        "serve/ingress.py",
        {"answer(self._core.serving, COMPLETIONS": "answer(self._core.serving, CHAT"},
        (WIRED,),
    ),
    Mutation(
        "The status page counts no sequence (R19).",
        "serve/ingress_core.py",
        {'"num_live": self._admission.num_live + self': '"num_live": 0 * self'},
        (WIRED,),
    ),
    Mutation(
        "A pool whose ranks hang is well (R06).",
        "serve/readiness.py",
        {'return next(found, "")': 'return ""'},
        (WIRED,),
    ),
    Mutation(
        "A forward takes its own number of tokens for that of all ranks (P03).",
        "cluster/rank/forward.py",
        {"num_tokens_across_dp=agreed.num_tokens_across_dp,": ""},
        ("tests/cluster/rank/test_free_memory.py",),
    ),
    Mutation(
        "A piece is compiled after the seal without a word (X01, J04).",
        "compile/cache/manager.py",
        {"        note_late_compile(str(piece))\n": ""},
        ("tests/compile/cache/test_manager.py",),
    ),
    Mutation(
        "Inductor compiles under its defaults (F06, F07, F09).",
        "compile/cache/inductor.py",
        {", config_patches=options)\n                return": ")\n                return"},
        ("tests/compile/cache/test_manager.py",),
    ),
    Mutation(
        "What is not saved is compiled under Inductor's defaults (F06, F07, F09).",
        "compile/cache/inductor.py",
        {", config_patches=options)\n            with": ")\n            with"},
        ("tests/compile/cache/test_manager.py",),
    ),
    Mutation(
        "The standalone compiler compiles under Inductor's defaults (F06, F07, F09).",
        "compile/cache/inductor.py",
        {"dict(source.options)},": "{}},"},
        ("tests/compile/cache/test_manager.py",),
    ),
    Mutation(
        "A decode step replays what mixed steps do (N02).",
        "compile/dispatch.py",
        {"captured.mode.decode_mode() if is_uniform_decode else ": ""},
        (FORWARD,),
    ),
    Mutation(
        "Each rank tells how far its captures are (C04).",
        "compile/graphs/capture.py",
        {"if progress is not None and rank == 0:": "if progress is not None:"},
        ("tests/cluster/rank/test_free_memory.py",),
    ),
    Mutation(
        "A forward that decides on data is refused without its remedy (J07).",
        "compile/pieces/diagnose.py",
        {'        r"[Dd]ata-dependent branching",\n': '        r"(?!)",\n'},
        ("tests/compile/pieces/test_decorator.py",),
    ),
    Mutation(
        "A prefill rank does not look for leases that have ended (P18).",
        "cluster/kv/transport/server.py",
        {"expired = self._holder.tick()": "expired: list[int] = []"},
        (WIRED,),
    ),
    Mutation(
        "KV that nobody fetches is held as long as its rank lives (P18).",
        "cluster/kv/handoff.py",
        {"            if lease.deadline > now:\n": "            if True:\n"},
        ("tests/cluster/kv/test_handoff.py",),
    ),
    Mutation(
        "A stream writes what others still read (O08).",
        "compile/passes/streams.py",
        {"            before.update(readers.pop(key, ()))\n": ""},
        ("tests/simulation/test_cuda_streams.py",),
    ),
    Mutation(
        "What one stream allocated and another uses is let go of in the middle of a piece (O08).",
        "compile/passes/streams.py",
        {"self._call(join_streams, *held)": "self._call(join_streams)"},
        ("tests/simulation/test_cuda_streams.py",),
    ),
    Mutation(
        "What sets streams is dead code to torch (O09).",
        "compile/passes/stream_ops.py",
        {"@has_side_effect\ndef set_stream": "def set_stream"},
        ("tests/compile/passes/test_streams.py",),
    ),
    Mutation(
        "A rank fills its slot of shared memory while others read it (P01).",
        "model/kernels/cpu/cpp/communicator.cpp",
        {"(int64_t)(at.exchange & 1)": "0"},
        ("tests/model/kernels/test_communicator.py",),
    ),
    Mutation(
        "Pieces run on one stream, however many were asked for (O08, O09).",
        "compile/passes/manager.py",
        {"self._max_num_streams, storages)": "1, storages)"},
        ("tests/simulation/test_cuda_streams.py",),
    ),
    Mutation(
        "A GPU reads its peers' rows before they say that those are there (O02).",
        "model/kernels/triton/all_reduce.py",
        {"    while least < count:\n": "    while least < count - 1:\n"},
        ("tests/model/kernels/test_triton.py::test_kernels_equal_their_torch_references",),
    ),
    Mutation(
        "A rank maps its GPU's memory though another rank cannot (O02).",
        "cluster/group/peer_memory.py",
        {"in enumerate(reasons) if it": "in enumerate(reasons) if it and each == shard.rank"},
        ("tests/cluster/group/test_peer_memory.py",),
    ),
    Mutation(
        "Ranks that share memory exchange through sockets (P01).",
        "cluster/group/membership.py",
        {"if memory is not None:": "if False:"},
        ("tests/cluster/group/test_membership.py",),
    ),
    Mutation(
        "Keys of an FP8 cache are taken without their scale (S09).",
        "model/kernels/cpu/cpp/paged_decode.cpp",
        {"scale * cache.scales.key(g / group)": "scale"},
        (KERNELS, FP8_KV),
    ),
    Mutation(
        "Values go into an FP8 cache without their scale (S09).",
        "model/kernels/cpu/cpp/rope_and_write_kv.cpp",
        {"load(x + d) / scale);": "load(x + d));"},
        (KERNELS, FP8_KV),
    ),
    Mutation(
        "A number halfway between two of e4m3 is rounded up (S09).",
        "model/kernels/cpu/cpp/simd.h",
        {"(bits + 0x7ffff + ((bits >> 20) & 1)) >> 20": "(bits + 0x80000) >> 20"},
        (KERNELS,),
    ),
    Mutation(
        "A layer's scale of keys is its values' and the other way round (S09).",
        "model/weights.py",
        {"layer.kv_scales = scales.to(": "layer.kv_scales = scales.flip(0).to("},
        (FP8_KV,),
    ),
    Mutation(
        "All ranks take the first heads' scales of FP8 KV (S09).",
        "model/weights.py",
        {"of_all[first : first + count]": "of_all[:count]"},
        (f"{FP8_KV}::test_each_rank_reads_the_scales_of_its_heads[shape0-2]",),
    ),
    Mutation(
        "Engines read KV that is FP8 as if it were not (S09).",
        "serve/config.py",
        {"KV_AXES, dtypes, engine": "KV_AXES, engine.dtype, engine"},
        ("tests/serve/test_config.py",),
    ),
    Mutation(
        "An adapter goes that an ingress offers which has not heard that it leaves (S10).",
        "cluster/actors/adapter_set.py",
        {"each.adapters_revision < left_at)": "False)"},
        (ADAPTERS,),
    ),
    Mutation(
        "An adapter goes that requests have which run (S10).",
        "cluster/actors/adapter_set.py",
        {"or entry.adapter.id in each.used_adapters": "or False"},
        (ADAPTERS,),
    ),
    Mutation(
        "An adapter is loaded twice whose first answer got lost (S10).",
        "cluster/actors/adapter_set.py",
        {"each.changed_by == call.id for": "False for"},
        (ADAPTERS,),
    ),
    Mutation(
        "A board that restarts ends with the handle of its owner (S10).",
        "cluster/actors/status_board.py",
        {"is_dead = not isinstance(error, ray.exceptions.ActorUnavailableError)": "is_dead = True"},
        (ADAPTERS,),
    ),
    Mutation(
        "A board ends since two calls that found the one before dead both look for it (R15).",
        "cluster/actors/status_board.py",
        {"if is_dead and self._board is asked:": "if is_dead:"},
        ("tests/cluster/actors/test_status_board.py",),
    ),
    Mutation(
        "An ingress waits for ever for the board once Ray has cancelled a call to it (R15).",
        "cluster/actors/status_board.py",
        {'"allow_out_of_order_execution": True': '"allow_out_of_order_execution": False'},
        ("tests/cluster/actors/test_status_board.py",),
    ),
    Mutation(
        "A rank never answers once Ray has cancelled a call that it never got (R15).",
        "cluster/actors/rank_actor.py",
        {'"allow_out_of_order_execution": True': '"allow_out_of_order_execution": False'},
        (
            "tests/cluster/actors/test_ray_ranks.py::"
            "test_ranks_answer_after_a_request_was_cancelled_that_asked_while_they_were_made",
        ),
    ),
    Mutation(
        "What a process said earlier is counted twice if it comes later (R15).",
        "cluster/observe/counts.py",
        {
            "last = self.last[source] = self.last.pop(source, {})": (
                "last = self.last.pop(source, {})\n        self.last[source] = dict(counts)"
            )
        },
        ("tests/cluster/observe/test_counts.py",),
    ),
    Mutation(
        "A late answer of the board brings an adapter back (S10).",
        "serve/served_models.py",
        {"if adapters.revision < self.revision:": "if False:"},
        ("tests/serve/test_served_models.py",),
    ),
    Mutation(
        "A request goes to an engine that has not loaded its adapter (S10).",
        "serve/pools/directory.py",
        {"adapter_id < FIRST_LOADED_ID or ": "True or "},
        ("tests/serve/pools/test_directory.py", LOADING),
    ),
    Mutation(
        "A group is not told again of adapters where telling it failed (S10).",
        "serve/pools/pool_core.py",
        {
            "await reported.set_adapters(wanted)\n                    told_adapters = wanted": (
                "told_adapters = wanted\n                    await reported.set_adapters(wanted)"
            )
        },
        ("tests/serve/pools/test_pool.py",),
    ),
    Mutation(
        "A client's key loads adapters (S10).",
        "serve/openai/middleware.py",
        {"if not admin_keys.has(key):": "if not (admin_keys.has(key) or self._keys.has(key)):"},
        (LOADING,),
    ),
    Mutation(
        "A rank's first GPU is not the one that Ray gave it (P19).",
        "cluster/group/device.py",
        {'",".join([own, *others])': '",".join(listed)'},
        ("tests/cluster/group/test_device.py",),
    ),
    Mutation(
        "Torch does not find a group by its name (K08).",
        "model/parallel.py",
        {"            _register_process_group(key, group)\n": ""},
        ("tests/model/test_parallel.py",),
    ),
)
