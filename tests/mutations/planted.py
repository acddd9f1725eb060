"""Bugs to plant, one at a time: each is a slip that the tests named beside it must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One planted bug. Invariant: each text that it replaces stands in its file exactly once."""

    name: str
    claim: str
    """What is broken."""
    path: str
    """Of the file, from the repository's root."""
    edits: dict[str, str]
    """By the text that is there what takes its place."""
    tests: tuple[str, ...]
    """Files or tests of which at least one must fail."""


PARITY = (
    "tests/cluster/test_compiled_parity.py::"
    "test_every_captured_size_generates_what_transformers_does"
)
READY = "tests/cluster/rank/test_ready.py"

MUTATIONS = (
    Mutation(
        "capture_ascends",
        "Sizes are captured smallest first, so larger ones find no memory to use again.",
        "compile/graphs/capture.py",
        {
            "return mode.value, -key.num_tokens, -(key.num_seqs or 0)": (
                "return mode.value, key.num_tokens, key.num_seqs or 0"
            )
        },
        ("tests/compile/graphs/test_capture.py",),
    ),
    Mutation(
        "damaged_artifact_is_loaded",
        "An artifact is loaded without comparing its content with its name.",
        "compile/cache/artifacts.py",
        {"if (found := hashlib.sha256(data).hexdigest()) != name:": "if not (found := name):"},
        ("tests/compile/cache/test_artifacts.py", "tests/compile/cache/test_cache.py"),
    ),
    Mutation(
        "exact_size_never_wins",
        "A piece that was compiled for exactly this number of tokens is not chosen.",
        "compile/pieces/piecewise.py",
        {"if count in self.runnables:\n            return": "if False:\n            return"},
        ("tests/compile/pieces/test_piecewise.py",),
    ),
    Mutation(
        "host_values_are_followed",
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
        "key_forgets_passes",
        "The key of the cache does not say which passes rewrote the code.",
        "compile/cache/key.py",
        {'    "passes",\n': "", 'factors["compilation.passes"] +=': "_ ="},
        ("tests/compile/cache/test_key.py",),
    ),
    Mutation(
        "layers_never_equal",
        "Equal layers have different keys, so each one is compiled.",
        "compile/pieces/split.py",
        {
            "return hashlib.sha256(text.encode()).hexdigest()": (
                'return hashlib.sha256(f"{id(graph)} {text}".encode()).hexdigest()'
            )
        },
        ("tests/compile/pieces/test_split.py", "tests/compile/pieces/test_backend.py"),
    ),
    Mutation(
        "memory_is_handed_out_twice",
        "A pool frees a block that is still held.",
        "compile/graphs/cpu/pool.py",
        {
            "memory = self._arena.memory(block)\n": (
                "memory = self._arena.memory(block)\n        self._arena.release(block)\n"
            )
        },
        ("tests/compile/graphs/cpu/test_graphs.py", "tests/compile/graphs/cpu/test_arena.py"),
    ),
    Mutation(
        "moved_input_is_replayed",
        "A graph is replayed although its input lies elsewhere.",
        "compile/graphs/wrapper.py",
        {"if addresses != entry.addresses:": "if len(addresses) != len(entry.addresses):"},
        ("tests/compile/graphs/test_wrapper.py",),
    ),
    Mutation(
        "padding_keeps_old_rows",
        "Padding of a decode step keeps the lengths of an earlier step's sequences.",
        "cluster/rank/inputs.py",
        {"self._seq_lens.host[num_seqs:end_seqs] = 0": "pass"},
        ("tests/cluster/rank/test_padding.py",),
    ),
    Mutation(
        "padding_rounds_down",
        "A step replays the next smaller graph.",
        "compile/sizes.py",
        {"at = bisect_left(sizes, wanted)": "at = max(0, bisect_left(sizes, wanted) - 1)"},
        ("tests/compile/test_sizes.py", "tests/compile/test_dispatch.py"),
    ),
    Mutation(
        "residual_is_not_summed",
        "The fused norm hands on its norm in place of the residual's sum.",
        "compile/passes/fuse_add_rms_norm.py",
        {"(fused, i)) for i in range(2)]": "(fused, 0)) for _ in range(2)]"},
        ("tests/compile/passes/test_fuse_add_rms_norm.py",),
    ),
    Mutation(
        "split_every_op_apart",
        "Splitting ops that follow one another no longer share one eager piece.",
        "compile/pieces/split.py",
        {"if current not in eager:": "if True:"},
        ("tests/compile/pieces/test_split.py",),
    ),
    Mutation(
        "steps_never_replay",
        "Steps run eagerly although their graphs were captured.",
        "cluster/rank/forward.py",
        {
            "cudagraph_runtime_mode=mode.mode if mode else CUDAGraphMode.NONE,": (
                "cudagraph_runtime_mode=CUDAGraphMode.NONE,"
            )
        },
        (PARITY,),
    ),
    Mutation(
        "pieces_never_replay",
        "Pieces are captured, and run eagerly in every step (B02, B05, B07, N02).",
        "compile/graphs/wrapper.py",
        {
            "if context.cudagraph_runtime_mode is not self.mode:": (
                "if context.cudagraph_runtime_mode is not self.mode or not (\n"
                "            self.mode is CUDAGraphMode.FULL or is_in_capture_window()\n"
                "        ):"
            )
        },
        (PARITY,),
    ),
    Mutation(
        "mixed_steps_never_replay",
        "Whole graphs of mixed steps are captured and never replayed (B03, Q02).",
        "compile/dispatch.py",
        {"return _whole_mixed(num_tokens, num_seqs, captured) or eager": "return eager"},
        (PARITY,),
    ),
    Mutation(
        "mixed_steps_split_decodes_off",
        "A whole graph of mixed steps is captured with decodes, whose number it freezes (B03).",
        "cluster/rank/inputs.py",
        {
            "is_decode = num_tokens == num_seqs and not is_mixed": (
                "is_decode = num_tokens == num_seqs"
            )
        },
        (PARITY,),
    ),
    Mutation(
        "strict_seal_captures",
        "A strictly sealed process runs what it did not capture without a word.",
        "compile/graphs/capture.py",
        {
            'raise LateCapture("capture", "none after the process was sealed", what)': "return",
        },
        ("tests/compile/graphs/test_capture.py", "tests/compile/graphs/test_wrapper.py"),
    ),
    Mutation(
        "ranks_are_never_sealed",
        "A rank that is ready still compiles and captures (X01).",
        "cluster/rank/forward.py",
        {"seal(self.config.sealed)": "pass"},
        (READY,),
    ),
    Mutation(
        "captures_are_silent",
        "A rank that captures does not tell how far it is (C04).",
        "cluster/rank/forward.py",
        {'progress=None if progress is None else _named(progress, "capturing graphs"),': ""},
        (READY,),
    ),
    Mutation(
        "captures_take_what_is_not_there",
        "A rank captures without asking whether all ranks have the memory (P05).",
        "cluster/rank/forward.py",
        {"has_room=self._room.has_room,": ""},
        (READY,),
    ),
    Mutation(
        "pre_empted_goes_last",
        "A pre-empted sequence waits behind those that came after it (T03).",
        "cluster/engine/scheduler.py",
        {"insort(self._waiting, seq, key=_arrival)": "self._waiting.append(seq)"},
        ("tests/cluster/engine/test_scheduler.py",),
    ),
    Mutation(
        "reads_take_every_block",
        "A read of KV leaves no block for the running sequences to grow into (T03).",
        "cluster/engine/scheduler.py",
        {"return len(self.running) + len(self._ready) + len(self._reading)": "return 0"},
        ("tests/cluster/engine/test_handoff.py",),
    ),
    Mutation(
        "the_silent_make_others_guilty",
        "While a rank is silent, one that waits for it is taken for stuck (P09).",
        "cluster/engine/watchdog.py",
        {
            "return None if silent_s[longest] > STALE_AFTER_S else self._stuck(now)": (
                "return self._stuck(now)"
            )
        },
        ("tests/cluster/engine/test_watchdog.py",),
    ),
    Mutation(
        "ranks_decode_at_their_own_size",
        "Ranks that decode together are not padded to one size (P03, P04).",
        "cluster/engine/lockstep.py",
        {"if kind is StepKind.DECODE or forward.mode is not CUDAGraphMode.NONE:": "if False:"},
        ("tests/cluster/engine/test_lockstep.py",),
    ),
    Mutation(
        "idle_ranks_run_nothing",
        "A rank without work takes part in no collective of a step (P03).",
        "cluster/engine/lockstep.py",
        {"max(num_tokens, int(has_work))": "num_tokens"},
        ("tests/cluster/engine/test_lockstep.py",),
    ),
    Mutation(
        "one_rank_may_replay_alone",
        "A rank that may not use a graph does not keep the others from it (P04).",
        "cluster/engine/lockstep.py",
        {
            "is_graph_allowed=all(vote.graph_allowed for vote in votes),": (
                "is_graph_allowed=any(vote.graph_allowed for vote in votes),"
            )
        },
        ("tests/cluster/engine/test_lockstep.py",),
    ),
    Mutation(
        "an_attempt_that_was_lost_ends_the_request",
        "An ended KV read is told to the client as the end of its answer.",
        "serve/router.py",
        {"    FinishReason.KV_LOST,\n    FinishReason.REFUSED,": "    FinishReason.REFUSED,"},
        ("tests/serve/test_router.py",),
    ),
)
