"""What a configuration leaves open follows from level, limits, preset and attention."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.config import (
    DEFAULT_SPLITTING_OPS,
    AttentionGraphSupport,
    CompilationConfig,
    CUDAGraphMode,
)
from compile.dispatch import DEFAULT_NUM_TOKENS
from compile.errors import FieldError
from compile.resolve import DEFAULT_PASSES, PRESETS, StepLimits, resolve

NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH = CUDAGraphMode
NEVER, UNIFORM, ALWAYS = AttentionGraphSupport

LIMITS = StepLimits(512, 16384)
PATTERN = (1, 2, 4, 8, *range(16, 513, 16))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- the order ----------------------------------------------------------------------------------


@pytest.mark.feature("C05")
@pytest.mark.parametrize("field", ["num_warmups_full", "num_warmups_piecewise"])
def test_a_gpu_captures_nothing_that_did_not_run_before(field: str) -> None:
    config = CompilationConfig(level=3, **{field: 0})
    with pytest.raises(FieldError) as caught:
        resolve(config, LIMITS, preset=BOTH, device="cuda")
    line = f"compilation.{field}: wanted at least 1 with device=cuda, found 0"
    assert str(caught.value) == line
    assert getattr(resolve(config, LIMITS, preset=BOTH, device="cpu"), field) == 0
    # Nothing is captured, so nothing is asked for.
    assert getattr(resolve(config, LIMITS, device="cuda", enforce_eager=True), field) == 0


def test_the_fused_norm_is_used_where_inductor_fuses_nothing() -> None:
    eager = CompilationConfig(level=3, use_inductor=False)
    assert resolve(eager, LIMITS).passes == DEFAULT_PASSES
    compiled = CompilationConfig(level=3)
    assert resolve(compiled, LIMITS, device="cpu").passes == ()
    # Norms are ops there, which Inductor cannot look into.
    assert resolve(compiled, LIMITS, device="cuda").passes == DEFAULT_PASSES
    given = CompilationConfig(level=3, passes=("fuse_add_rms_norm",))
    assert resolve(given, LIMITS).passes == given.passes


@pytest.mark.parametrize(
    ("given", "mode", "most", "warned"),
    [
        ({}, DECODE_ONLY, 12, "steps in which 9 to 12 sequences decode have no graph"),
        ({}, BOTH, 100, "steps in which 97 to 100 sequences decode have no graph"),
        ({}, DECODE_ONLY, 64, ""),
        ({}, PIECEWISE, 12, ""),  # pieces are captured for counts of tokens
        ({}, NONE, 12, ""),
        ({"cudagraph_capture_sizes": (4, 8)}, DECODE_ONLY, 12, ""),  # as asked
        ({"cuda_graph_sizes": (8,)}, DECODE_ONLY, 12, ""),
    ],
)
def test_the_fullest_steps_without_a_graph_are_told(
    caplog: pytest.LogCaptureFixture,
    given: dict[str, tuple[int, ...]],
    mode: CUDAGraphMode,
    most: int,
    warned: str,
) -> None:
    config = CompilationConfig(level=3, cudagraph_mode=mode, **given)
    resolved = resolve(config, StepLimits(most, 4096))
    assert resolve(resolved, StepLimits(most, 4096)) == resolved
    assert [warned in line for line in warnings_of(caplog)] == [True] * bool(warned)


# --- mode ---------------------------------------------------------------------------------------


@pytest.mark.feature("Q02")
@pytest.mark.parametrize("pool", PRESETS)
def test_a_pools_preset_counts_at_level_3_where_no_mode_is_given(pool: str) -> None:
    preset = {"prefill": PIECEWISE, "decode": DECODE_ONLY, "mixed": BOTH}[pool]
    assert PRESETS[pool] is preset
    for level in (0, 1, 2):
        config = CompilationConfig(level=level)
        assert resolve(config, LIMITS, preset=preset).cudagraph_mode is NONE
    assert resolve(CompilationConfig(level=3), LIMITS, preset=preset).cudagraph_mode is preset
    for mode in CUDAGraphMode:
        config = CompilationConfig(level=3, cudagraph_mode=mode)
        assert resolve(config, LIMITS, preset=preset).cudagraph_mode is mode


@pytest.mark.parametrize("preset", [None, *CUDAGraphMode])
def test_a_graph_that_is_not_split_is_not_captured_in_pieces(preset: CUDAGraphMode | None) -> None:
    config = resolve(CompilationConfig(level=3, splitting_ops=()), LIMITS, preset=preset)
    nearest = {None: NONE, PIECEWISE: NONE, BOTH: DECODE_ONLY}
    assert config.cudagraph_mode is nearest.get(preset, preset)
    assert config.splitting_ops == ()


@pytest.mark.feature("A10")
@pytest.mark.parametrize("level", range(4))
def test_use_cudagraph_off_means_mode_none_and_leaves_compilation_alone(level: int) -> None:
    for mode in (None, FULL):
        config = CompilationConfig(level=level, cudagraph_mode=mode, use_cudagraph=False)
        found = resolve(config, LIMITS, preset=BOTH)
        assert (found.cudagraph_mode, found.graph_mode, found.level) == (NONE, NONE, level)
    found = resolve(CompilationConfig(level=level), LIMITS)
    assert found.graph_mode is (PIECEWISE if level == 3 else NONE)
    assert resolve(CompilationConfig(), LIMITS).level == 0


@pytest.mark.parametrize("mode", [None, *CUDAGraphMode])
def test_enforce_eager_wins_over_level_and_mode_and_needs_no_size_to_capture(
    mode: CUDAGraphMode | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = CompilationConfig(
        level=3,
        cudagraph_mode=mode,
        cudagraph_copy_inputs=mode in (None, PIECEWISE),
        cudagraph_capture_sizes=(100,),
        capture_num_tokens=(100,),
    )
    found = resolve(config, StepLimits(4, 8), preset=BOTH, enforce_eager=True)
    assert (found.level, found.cudagraph_mode) == (0, NONE)
    assert not found.cudagraph_copy_inputs
    assert warnings_of(caplog) == []


# --- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "attention", "wanted"),
    [
        (3, ALWAYS, {mode: mode for mode in CUDAGraphMode}),
        (0, ALWAYS, {mode: mode for mode in CUDAGraphMode}),
        (3, UNIFORM, {mode: BOTH if mode is FULL else mode for mode in CUDAGraphMode}),
        (0, UNIFORM, {mode: BOTH if mode is FULL else mode for mode in CUDAGraphMode}),
        (2, UNIFORM, {NONE: NONE, FULL: DECODE_ONLY, DECODE_ONLY: DECODE_ONLY}),
        (3, NEVER, {mode: NONE if mode is NONE else PIECEWISE for mode in CUDAGraphMode}),
        (0, NEVER, {mode: NONE if mode is NONE else PIECEWISE for mode in CUDAGraphMode}),
        (2, NEVER, {NONE: NONE, FULL: NONE, DECODE_ONLY: NONE}),
    ],
)
def test_a_mode_becomes_the_nearest_that_attention_can_be_part_of(
    level: int,
    attention: AttentionGraphSupport,
    wanted: dict[CUDAGraphMode, CUDAGraphMode],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for mode, nearest in wanted.items():
        caplog.clear()
        config = CompilationConfig(level=level, cudagraph_mode=mode)
        found = resolve(config, LIMITS, attention=attention, backend_name="triton_attention")
        assert found.cudagraph_mode is nearest
        warned = [
            f"compilation.cudagraph_mode: {mode.name} became {nearest.name}: graphs of the "
            f"attention backend triton_attention: {attention.name}"
        ]
        assert warnings_of(caplog) == ([] if mode is nearest else warned)


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.feature("C01")
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, PATTERN),
        ({"cuda_graph_sizes": (100,)}, (1, 2, 4, 8, 16, 32, 48, 64, 80, 96)),
        ({"cuda_graph_sizes": (16,)}, (1, 2, 4, 8, 16)),
        ({"cuda_graph_sizes": (15,)}, (1, 2, 4, 8)),
        ({"cuda_graph_sizes": (4,)}, (1, 2, 4, 8)),
        ({"cuda_graph_sizes": (40, 3, 40)}, (3, 40)),
        ({"cuda_graph_sizes": (40, 3), "cudagraph_capture_sizes": (6, 5, 6)}, (5, 6)),
    ],
)
def test_batch_sizes_follow_the_rule(fields: dict[str, Any], wanted: tuple[int, ...]) -> None:
    assert resolve(CompilationConfig(level=3, **fields), LIMITS).graph_bs == wanted


@pytest.mark.feature("C03")
@pytest.mark.parametrize("field", ["cudagraph_capture_sizes", "cuda_graph_sizes"])
def test_sizes_that_no_step_can_have_are_dropped_with_one_warning(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: Any = {field: (64, 4, 12, 65, 1000)}
    config = CompilationConfig(level=3, cudagraph_mode=FULL, **sizes)
    assert resolve(config, StepLimits(64, 2048)).graph_bs == (4, 12, 64)
    assert resolve(config, StepLimits(64, 36, query_len=3)).graph_bs == (4, 12)
    assert warnings_of(caplog) == [
        f"compilation.{field}: dropped 65, 1000: a step has at most 64 decoding sequences",
        f"compilation.{field}: dropped 64, 65, 1000: a step has at most 12 decoding sequences",
    ]


def test_what_was_dropped_is_not_mentioned_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"cudagraph_capture_sizes": (4, 99), "capture_num_tokens": (4, 99)}
    config = CompilationConfig(level=3, compile_sizes=(4, 99), **asked)  # type: ignore[arg-type]
    found = resolve(config, StepLimits(8, 64), preset=BOTH)
    assert len(warnings_of(caplog)) == 3
    caplog.clear()
    assert resolve(found, StepLimits(8, 64), attention=UNIFORM) == found
    assert warnings_of(caplog) == []


@pytest.mark.feature("C03")
@pytest.mark.parametrize("mode", [FULL, DECODE_ONLY, BOTH])
def test_no_size_left_is_an_error_that_names_the_bound(mode: CUDAGraphMode) -> None:
    config = CompilationConfig(level=3, cudagraph_mode=mode, cudagraph_capture_sizes=(65, 100))
    with pytest.raises(FieldError) as error:
        resolve(config, StepLimits(64, 2048))
    assert str(error.value) == (
        "compilation.cudagraph_capture_sizes: wanted a size of at most 64 "
        "(decoding sequences of the largest step), found [65, 100]"
    )
    assert resolve(replace(config, use_cudagraph=False), StepLimits(64, 2048)).graph_bs == ()


@pytest.mark.feature("C03")
@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=8),
    st.integers(1, 64),
    st.integers(1, 128),
    st.integers(1, 4),
)
def test_exactly_the_sizes_that_can_be_scheduled_are_kept(
    sizes: list[int], max_num_seqs: int, budget: int, query_len: int
) -> None:
    config = CompilationConfig(level=3, cudagraph_mode=FULL, cudagraph_capture_sizes=tuple(sizes))
    limits = StepLimits(max_num_seqs, budget, query_len)
    possible = {n for n in sizes if n <= max_num_seqs and n * query_len <= budget}
    if possible:
        assert resolve(config, limits).graph_bs == tuple(sorted(possible))
        return
    with pytest.raises(FieldError):
        resolve(config, limits)


@pytest.mark.feature("N03")
def test_token_counts_are_sorted_deduped_and_bounded_by_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    default = resolve(CompilationConfig(level=3), LIMITS).capture_num_tokens
    assert default == (1, 2, 4, 8, 16, 32, 64, 128, *range(256, 3073, 256))
    assert default is not None and len(default) == 20
    config = CompilationConfig(level=3, capture_num_tokens=(900, 7, 7, 901, 30))
    assert resolve(config, StepLimits(1, 900)).capture_num_tokens == (7, 30, 900)
    assert warnings_of(caplog) == [
        "compilation.capture_num_tokens: dropped 901: a step has at most 900 tokens"
    ]
    with pytest.raises(FieldError) as error:
        resolve(config, StepLimits(1, 6))
    assert str(error.value) == (
        "compilation.capture_num_tokens: wanted a size of at most 6 (tokens of the largest step), "
        "found [7, 30, 900, 901]"
    )


def test_listed_batch_sizes_are_token_counts_where_only_pieces_were_asked_for() -> None:
    listed = CompilationConfig(level=3, cudagraph_capture_sizes=(4, 8))
    asked = replace(listed, cudagraph_mode=PIECEWISE)
    limits = StepLimits(512, 16384, query_len=2)
    assert resolve(listed, limits).capture_num_tokens == (8, 16)
    assert resolve(asked, limits, preset=BOTH).capture_num_tokens == (8, 16)
    for preset in (PIECEWISE, BOTH):
        found = resolve(listed, limits, preset=preset)
        assert found.capture_num_tokens == DEFAULT_NUM_TOKENS
    assert resolve(CompilationConfig(level=3), limits).capture_num_tokens == DEFAULT_NUM_TOKENS


def test_listed_token_counts_are_bounded_by_tokens_and_not_by_sequences(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = StepLimits(64, 2048)
    given = (1, 8, 128, 512, 4096)
    config = CompilationConfig(level=3, cudagraph_mode=PIECEWISE, cudagraph_capture_sizes=given)
    assert resolve(config, limits).capture_num_tokens == (1, 8, 128, 512)
    dropped = "dropped 4096: a step has at most 2048 tokens"
    assert warnings_of(caplog) == [f"compilation.cudagraph_capture_sizes: {dropped}"]
    # None of them is a batch size that a step can have, and none has to be.
    config = replace(config, cudagraph_capture_sizes=(128, 256))
    assert resolve(config, limits).capture_num_tokens == (128, 256)
    with pytest.raises(FieldError, match="wanted a size of at most 64"):
        resolve(replace(config, cudagraph_mode=FULL), limits)


def test_fields_that_a_level_does_not_read_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for level in range(4):
        config = CompilationConfig(
            level=level, compile_sizes=(4,), compile_ranges=((5, 8),), compile_lazily=True
        )
        caplog.clear()
        resolve(config, LIMITS)
        told = [line.split(":")[0] for line in warnings_of(caplog)]
        fields = ["compile_sizes", "compile_ranges", "compile_lazily"]
        assert told == [f"compilation.{field}" for field in fields if level < 3]


def test_the_name_of_capture_sizes_stands_for_their_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = CompilationConfig(
        level=3,
        cudagraph_capture_sizes=(8, 2),
        compile_sizes=(5, "cudagraph_capture_sizes", 4, 33, 5),
    )
    assert resolve(config, LIMITS).compile_sizes == (2, 4, 5, 8, 33)
    assert resolve(config, StepLimits(8, 32, query_len=3)).compile_sizes == (2, 4, 5, 6, 8, 24)
    assert resolve(CompilationConfig(level=3), LIMITS).compile_sizes == ()
    assert warnings_of(caplog) == [
        "compilation.compile_sizes: dropped 33: a step has at most 32 tokens"
    ]


# --- all together -------------------------------------------------------------------------------


@pytest.mark.feature("A11", "Q02")
@pytest.mark.parametrize(
    ("fields", "enforce_eager", "changes"),
    [
        *(
            ({"level": level}, False, {"level": level, "splitting_ops": (), "cudagraph_mode": NONE})
            for level in (1, 2)
        ),
        *(
            ({"level": 3, "cudagraph_mode": mode.name}, False, {"cudagraph_mode": mode})
            for mode in (FULL, DECODE_ONLY, BOTH)
        ),
        ({"level": 3}, False, {}),
        ({"level": 3, "cudagraph_capture_sizes": [1, 2, 4, 8]}, False, {"graph_bs": (1, 2, 4, 8)}),
        ({}, True, {"level": 0, "splitting_ops": (), "cudagraph_mode": NONE}),
        ({"level": 0}, False, {"level": 0, "splitting_ops": (), "cudagraph_mode": NONE}),
        ({"level": 3, "debug_dump_path": "/tmp/d"}, False, {"debug_dump_path": "/tmp/d"}),
    ],
)
def test_common_configurations_give_what_the_guide_says(
    fields: dict[str, Any], enforce_eager: bool, changes: dict[str, Any]
) -> None:
    config = resolve(CompilationConfig(**fields), LIMITS, enforce_eager=enforce_eager)
    wanted = {
        "level": 3,
        "splitting_ops": DEFAULT_SPLITTING_OPS,
        "cudagraph_mode": PIECEWISE,
        "cuda_graph_sizes": (512,),
        "graph_bs": PATTERN,
        "debug_dump_path": "",
        **changes,
    }
    assert {name: getattr(config, name) for name in wanted} == wanted


@st.composite
def configurations(draw: st.DrawFn) -> CompilationConfig:
    sizes = st.none() | st.lists(st.integers(1, 600), min_size=1, max_size=4).map(lambda s: [1, *s])
    level = draw(st.integers(0, 3))
    modes = [None, NONE, FULL, DECODE_ONLY, *([PIECEWISE, BOTH] if level == 3 else [])]
    return CompilationConfig(
        level=level,
        use_cudagraph=draw(st.booleans()),
        cudagraph_mode=draw(st.sampled_from(modes)),
        cudagraph_capture_sizes=draw(sizes),
        cuda_graph_sizes=draw(sizes) or (),
        capture_num_tokens=draw(sizes),
        compile_sizes=draw(st.none() | st.lists(st.just("cudagraph_capture_sizes") | st.just(3))),
    )


@given(
    configurations(),
    st.sampled_from([None, *CUDAGraphMode]),
    st.sampled_from(AttentionGraphSupport),
    st.integers(1, 64),
    st.integers(1, 3),
    st.booleans(),
)
def test_nothing_is_left_open_and_resolving_again_changes_nothing(
    config: CompilationConfig,
    preset: CUDAGraphMode | None,
    attention: AttentionGraphSupport,
    max_num_seqs: int,
    query_len: int,
    enforce_eager: bool,
) -> None:
    limits = StepLimits(max_num_seqs, 64 * query_len, query_len)
    arguments: dict[str, Any] = {"preset": preset, "attention": attention}
    found = resolve(config, limits, enforce_eager=enforce_eager, **arguments)
    assert found.splitting_ops is not None
    assert found.cudagraph_mode is not None
    assert found.capture_num_tokens is not None
    assert found.compile_sizes is not None
    assert all(isinstance(size, int) for size in found.compile_sizes)
    assert list(found.graph_bs) == sorted(set(found.graph_bs))
    assert list(found.capture_num_tokens) == sorted(set(found.capture_num_tokens))
    for other in (preset, None, BOTH):
        assert resolve(found, limits, preset=other, attention=attention) == found


@pytest.mark.feature("X06")
def test_a_server_on_a_cpu_starts_before_it_has_compiled_if_the_cache_can_keep_it() -> None:
    def resolved(device: str = "cpu", *, is_served: bool = True, **fields: Any) -> str:
        config = CompilationConfig(**{"level": 3, **fields})
        limits = StepLimits(8, 64)
        found = resolve(config, limits, device=device, is_served=is_served)
        assert resolve(found, limits, device=device) == found
        return found.serve_while_compiling

    assert resolved() == resolved(level=2) == "on"
    assert resolved(serve_while_compiling="on", is_served=False) == "on"
    assert resolved(serve_while_compiling="off") == "off"
    assert resolved(is_served=False) == resolved("cuda") == "off"
    for fields in (
        {"level": 1},
        {"use_inductor": False},
        {"compiler": "eager"},
        {"compile_lazily": True},
        {"reserve_graph_memory": True},
    ):
        assert resolved(**fields) == "off", fields
    with pytest.raises(FieldError, match=r"serve_while_compiling: .* device=cuda"):
        resolved("cuda", serve_while_compiling="on")
