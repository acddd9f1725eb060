"""A captured step replays on CPU as it ran, from fixed addresses, and keeps what a graph keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from compile.context import ForwardContext, forward_context, get_forward_context
from compile.custom_op import direct_register_custom_op
from compile.errors import CaptureError, ReplayError
from compile.graphs.boundary import active, boundary
from compile.graphs.cpu.pool import CpuGraphPool
from compile.graphs.cpu.recorder import CpuStepGraph
from compile.graphs.pools import GraphPool, StepGraph, new_graph_pool, new_step_graph

CPU = torch.device("cpu")
N = 4
WEIGHT = torch.randn(N, N, generator=torch.Generator().manual_seed(0))
ORDER = torch.tensor([2, 0, 3, 1])


def _running_sum(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write into `out` and return a new tensor, after looking at values."""
    scale = 0.5 if float(x.sum()) > 0 else 0.25
    out.copy_(x.cumsum(0).mul_(scale).tanh_())
    return x * scale


running_sum = direct_register_custom_op(
    "test_running_sum", _running_sum, mutates_args=["out"], fake_impl=lambda x, out: x.clone()
)


def new_graph(pool: GraphPool | None = None) -> StepGraph:
    return new_step_graph(pool or new_graph_pool(CPU))


def captured(fn: Callable[[], Any], pool: GraphPool | None = None) -> tuple[StepGraph, Any]:
    graph = new_graph(pool)
    return graph, graph.capture(fn)


# --- programs -----------------------------------------------------------------------------------
# A program is a list of (op, i, j); an op takes values i and j, all [N, N], and may append one.

Values = list[torch.Tensor]


def _piece(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return fresh memory, two views of one memory, an expanded row and an input."""
    both = torch.cat([a.sin(), b.cos()])
    return both[:N], both[N:], (a + b)[:1].tanh().expand(N, N), a


piece = boundary(_piece)


def _write_half(values: Values, a: torch.Tensor, b: torch.Tensor) -> None:
    a[: N // 2].copy_(b[N // 2 :].clone())


def _out(values: Values, a: torch.Tensor, b: torch.Tensor) -> None:
    values.append(torch.maximum(a, b, out=torch.empty_like(a)))


def _opaque(values: Values, a: torch.Tensor, b: torch.Tensor) -> None:
    out = a.new_empty(N, N)
    values.extend([running_sum(b, out), out])


def _drop(values: Values, a: torch.Tensor, b: torch.Tensor) -> None:
    if len(values) > 3:
        del values[2]


OPS: list[Callable[[Values, torch.Tensor, torch.Tensor], Any]] = [
    lambda v, a, b: v.append((a + b) * 0.5),
    lambda v, a, b: v.append(a.mul(0.75)),
    lambda v, a, b: v.append(torch.tanh(a @ b)),
    lambda v, a, b: v.append(F.linear(a, WEIGHT, b[0]).tanh()),
    lambda v, a, b: v.append(torch.addmm(a, b, WEIGHT).sigmoid()),
    lambda v, a, b: v.append(F.softmax(a, -1)),
    lambda v, a, b: v.append(F.layer_norm(a, (N,), b[0], b[1]).tanh()),
    lambda v, a, b: v.append(F.scaled_dot_product_attention(a[None], b[None], a[None])[0]),
    lambda v, a, b: v.append(torch.cat([a[1:], b[:1]])),
    lambda v, a, b: v.append(torch.where(a > b, a, 0.25)),
    lambda v, a, b: v.append(F.embedding(ORDER, a) + torch.tensor(0.125)),
    lambda v, a, b: v.append(a.double().cumsum(0).float().tanh()),
    lambda v, a, b: v.append(a.max(0).values + b),
    lambda v, a, b: v.append(torch.full((N, N), 0.5)),
    # Views, which share memory with what they are of.
    lambda v, a, b: v.append(a.t()),
    lambda v, a, b: v.append(a.reshape(2, 2 * N).view(N, N)),
    lambda v, a, b: v.append(torch.stack([a, b]).unbind()[1]),
    lambda v, a, b: v.append(a.contiguous()),
    # Writes.
    lambda v, a, b: a.tanh_(),
    lambda v, a, b: a.copy_(b),
    lambda v, a, b: a.t()[1].mul_(0.5),
    lambda v, a, b: a.index_copy_(0, ORDER[:2], b[:2].clone()),
    lambda v, a, b: a.masked_fill_(b > 0.5, 0.25),
    _write_half,
    _out,
    _opaque,
    lambda v, a, b: v.extend(piece(a, b)[:2]),
    lambda v, a, b: v.extend(piece(a, b)[2:]),
    _drop,
]
PROGRAMS = st.lists(
    st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=24,
)
Program = list[tuple[int, int, int]]


def run(program: Program, inputs: Values) -> torch.Tensor:
    values = list(inputs)
    for op, i, j in program:
        # What is expanded cannot be written to.
        a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
        OPS[op](values, a.clone() if 0 in a.stride() else a, b)
    return torch.stack(values[-3:]).sum(0)


def draw(generator: torch.Generator) -> Values:
    return [torch.rand(N, N, generator=generator) - 0.5 for _ in range(2)]


def check_replays(graph: StepGraph, program: Program, static: Values, output: torch.Tensor) -> None:
    """Compare replays on new inputs with the program as it is, to the bit."""
    address = output.data_ptr()
    for seed in range(1, 4):
        fresh = draw(torch.Generator().manual_seed(seed))
        for buffer, value in zip(static, fresh, strict=True):
            buffer.copy_(value)
        graph.replay()
        wanted = run(program, fresh)
        assert torch.equal(output, wanted)
        # What the program writes into its inputs, the replay writes into the static ones.
        assert all(map(torch.equal, static, fresh))
        assert output.data_ptr() == address


@pytest.mark.feature("D06", "X02")
@given(program=PROGRAMS, is_inference=st.booleans())
def test_a_replay_equals_the_step_to_the_bit(program: Program, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        static = draw(torch.Generator().manual_seed(0))
        wanted = run(program, [x.clone() for x in static])
        graph, output = captured(lambda: run(program, static))
        assert torch.equal(output, wanted)
        check_replays(graph, program, static, output)


@given(programs=st.lists(PROGRAMS, min_size=2, max_size=3))
def test_graphs_of_one_pool_replay_in_turn(programs: list[Program]) -> None:
    pool = new_graph_pool(CPU)
    steps = []
    for program in programs:
        static = draw(torch.Generator().manual_seed(0))
        graph, output = captured(lambda p=program, s=static: run(p, s), pool)
        # As a wrapper holds it: what one graph leaves, the next may overwrite.
        steps.append((graph, program, static, pool.weak_ref(output)))
        del output
    for step in [*steps, *reversed(steps)]:
        check_replays(*step)


def test_a_compiled_piece_is_one_call_and_is_compiled_once() -> None:
    compilations = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(module)
        return module.forward

    fn = boundary(torch.compile(_piece, backend=backend, dynamic=False))
    static = draw(torch.Generator().manual_seed(0))
    with torch.inference_mode():
        fn(*static)
        graph = CpuStepGraph(CpuGraphPool(poison=False))
        outputs = graph.capture(lambda: fn(*static))
        assert graph._recorder is not None
        assert [len(part.calls) for part in graph._recorder.parts] == [1]
        for seed in range(1, 4):
            fresh = draw(torch.Generator().manual_seed(seed))
            for buffer, value in zip(static, fresh, strict=True):
                buffer.copy_(value)
            graph.replay()
            assert all(map(torch.equal, outputs, _piece(*static)))
    assert len(compilations) == 1


class Pair(NamedTuple):
    hidden: torch.Tensor
    name: str


def test_a_piece_keeps_strides_shared_memory_containers_and_what_is_no_tensor() -> None:
    x = torch.rand(N, N)
    others = boundary(lambda a: [{"n": 3, "t": a.t().sin()}, (None, Pair(a.cos(), "cos"))])
    _, (top, bottom, row, same) = captured(lambda: piece(x, x))
    graph, found = captured(lambda: others(x))
    named, (nothing, pair) = found
    assert top.untyped_storage().data_ptr() == bottom.untyped_storage().data_ptr()
    assert bottom.data_ptr() == top.data_ptr() + N * N * 4
    assert (row.stride(), named["t"].stride()) == ((0, 1), (1, N))
    assert same is x
    assert [type(each) for each in (found, found[1], pair)] == [list, tuple, Pair]
    assert (named["n"], nothing, pair.name) == (3, None, "cos")
    x.fill_(0.5)
    graph.replay()
    assert torch.equal(named["t"], x.t().sin()) and torch.equal(pair.hidden, x.cos())


# --- composite ops ------------------------------------------------------------------------------


def _move(source: torch.Tensor, out: torch.Tensor, num_bytes: int) -> bool:
    """Copy a tensor by a kernel that knows addresses alone, and serves four bytes or more."""
    address = out.data_ptr(), source.data_ptr(), num_bytes
    call, recorder = partial(_kernel, *address), active.recorder
    is_served: bool = call() if recorder is None else recorder.bound(call, (source, out))
    return is_served


def _kernel(to: int, source: int, num_bytes: int) -> bool:
    if num_bytes >= 4:
        ctypes.memmove(to, source, num_bytes)
    return num_bytes >= 4


entered: list[torch.dtype] = []


def _doubled(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    entered.append(x.dtype)
    copied = x.new_empty(x.shape)
    if not _move(x, copied, x.nbytes):
        copied = boundary(_by_values)(x)
    return copied * 2 + bias


def _by_values(x: torch.Tensor) -> torch.Tensor:
    return x.new_tensor(x.tolist())


doubled = direct_register_custom_op(
    "test_doubled", _doubled, fake_impl=lambda x, bias: x.clone(), is_composite=True
)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1024), (torch.uint8, 3)])
def test_a_composite_op_is_replayed_by_the_calls_that_it_made(
    dtype: torch.dtype, size: int, is_inference: bool
) -> None:
    pool = CpuGraphPool(segment_bytes=1 << 12)
    with torch.inference_mode(is_inference):
        x, bias = torch.ones(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        graph, output = captured(lambda: doubled(doubled(x, bias), bias), pool)
        assert output.tolist() == [4] * size
        x.fill_(5)
        entered.clear()
        graph.replay()
        assert output.tolist() == [20] * size
        assert not entered, "the op itself is not called again"
        assert doubled(x, bias).tolist() == [10] * size
    # Its scratch lies in the pool, and is used again.
    assert pool.num_bytes <= 4 * 4096


def test_a_tensor_of_a_bound_call_that_does_not_outlive_the_graph_is_named() -> None:
    owned = {"x": torch.ones(3)}
    bias = torch.zeros(3)
    graph, _ = captured(lambda: doubled(owned["x"], bias))
    graph.replay()
    del owned["x"]
    with pytest.raises(ReplayError, match=r"_kernel\[0\]: float32 \[3\]"):
        graph.replay()


# --- memory -------------------------------------------------------------------------------------


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = x + 1
    return x


def test_memory_of_dropped_tensors_is_reused_inside_of_a_graph() -> None:
    pool = CpuGraphPool(segment_bytes=1 << 12)
    x = torch.zeros(1024)
    graph, output = captured(lambda: chain(x, 50), pool)
    # One tensor is read while the next one is written.
    assert pool.num_bytes == 2 * 4096
    x.fill_(5)
    graph.replay()
    assert torch.equal(output, torch.full((1024,), 55.0))


def test_outputs_that_are_held_keep_their_memory() -> None:
    pool = CpuGraphPool(segment_bytes=1 << 12)
    held = [captured(lambda i=i: torch.zeros(1024) + i, pool)[1] for i in range(3)]
    assert [int(t.unique()) for t in held] == [0, 1, 2]
    assert pool.num_bytes == 4 * 4096


def test_a_replay_shows_where_a_step_reads_memory_that_it_let_go_of() -> None:
    pool = new_graph_pool(CPU)
    x = torch.ones(8)

    def step() -> torch.Tensor:
        doubled = x * 2
        loose = pool.weak_ref(doubled)
        del doubled
        return x + loose

    graph, output = captured(step, pool)
    graph.replay()
    assert output.isnan().all()


def test_a_graph_overwrites_what_another_one_let_go_of() -> None:
    pool = new_graph_pool(CPU)
    x = torch.ones(8)
    first, output = captured(lambda: x * 2, pool)
    loose = pool.weak_ref(output)
    del output
    second, _ = captured(lambda: x * 3 + 1, pool)
    first.replay()
    assert torch.equal(loose, torch.full((8,), 2.0))
    second.replay()
    assert not torch.equal(loose, torch.full((8,), 2.0))


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [(torch.bfloat16, None), (torch.int64, -(2**63)), (torch.uint8, 255), (torch.bool, True)],
)
def test_memory_that_nobody_wrote_is_poison(dtype: torch.dtype, poison: int | None) -> None:
    _, output = captured(lambda: torch.empty(5, dtype=dtype))
    assert output.isnan().all() if poison is None else (output == poison).all()


def test_a_pool_without_poison_leaves_values_alone() -> None:
    pool = new_graph_pool(CPU, poison=False)
    graph, output = captured(lambda: torch.empty(5), pool)
    output.fill_(3)
    graph.replay()
    assert torch.equal(output, torch.full((5,), 3.0))


# --- what is frozen -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Metadata:
    scale: float
    lengths: torch.Tensor
    extra: dict[str, list[int]] = field(default_factory=lambda: {"shift": [0]})


def _scaled(x: torch.Tensor) -> torch.Tensor:
    metadata: Metadata = get_forward_context().attn_metadata
    return x * metadata.scale + metadata.lengths + metadata.extra["shift"][0]


scaled = direct_register_custom_op("test_scaled", _scaled, fake_impl=lambda x: x.clone())


@pytest.mark.feature("L03")
def test_ops_of_a_replay_see_the_context_of_their_capture() -> None:
    lengths = torch.zeros(3)
    x = torch.ones(3)
    metadata = Metadata(2.0, lengths)
    with forward_context(ForwardContext(attn_metadata=metadata)):
        graph, output = captured(lambda: scaled(x))
    # Host values are those of the capture, whether they changed or another context is current.
    metadata.extra["shift"][0] = 100
    object.__setattr__(metadata, "scale", 50.0)
    lengths.fill_(7)
    now = ForwardContext(attn_metadata=Metadata(1000.0, torch.zeros(3)))
    with forward_context(now):
        graph.replay()
        assert get_forward_context() is now
    assert torch.equal(output, torch.full((3,), 9.0))
    del lengths, metadata
    with pytest.raises(ReplayError, match=r"forward context\.attn_metadata\.lengths: float32"):
        graph.replay()


def test_each_call_of_a_replay_sees_the_context_that_it_was_captured_in() -> None:
    x, zeros = torch.ones(3), torch.zeros(3)

    def step() -> torch.Tensor:
        results = []
        for scale in (2.0, 3.0):
            with forward_context(ForwardContext(attn_metadata=Metadata(scale, zeros))):
                results.append(scaled(x))
        return torch.cat(results)

    graph, output = captured(step)
    x.fill_(10)
    graph.replay()
    assert output.tolist() == [20.0] * 3 + [30.0] * 3


def test_a_tensor_that_does_not_outlive_the_graph_is_named() -> None:
    owned = {"bias": torch.ones(3)}
    x = torch.ones(3)
    graph, _ = captured(lambda: x + owned["bias"])
    graph.replay()
    del owned["bias"]
    with pytest.raises(ReplayError, match=r"aten::add at .*test_graphs.py:\d+\[1\]: float32 \[3\]"):
        graph.replay()


def test_a_tensor_that_the_step_made_of_host_values_is_refused_at_once() -> None:
    x = torch.ones(3)
    with pytest.raises(ReplayError, match=r"aten::add .* float32 \[3\] on cpu is gone"):
        captured(lambda: x + torch.tensor([1.0, 2.0, 3.0]))


# --- what is refused ----------------------------------------------------------------------------

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "data_ptr": lambda x: x.data_ptr(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "write through a mask": lambda x: x.index_put_((x > 0,), torch.ones(3)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave((x + 1).long()),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_value_between_ops_is_refused(
    read: Callable[[torch.Tensor], Any], is_inference: bool
) -> None:
    x = torch.ones(3)
    with (
        torch.inference_mode(is_inference),
        pytest.raises(CaptureError, match=r"test_graphs.py:\d+: wanted tensors that stay"),
    ):
        captured(lambda: read(x * 2))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_piece_may_read_values(read: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(3)

    def inside(x: torch.Tensor) -> torch.Tensor:
        read(x.clone())
        return x + 1

    graph, output = captured(lambda: boundary(inside)(x * 2))
    x.fill_(2)
    graph.replay()
    assert output.tolist() == [5.0] * 3


def test_one_value_may_be_written_through_a_mask() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])

    def step() -> torch.Tensor:
        y = x * 1
        y[y < 0] = 9
        return y

    graph, output = captured(step)
    x.copy_(torch.tensor([-1.0, 1.0, -2.0]))
    graph.replay()
    assert output.tolist() == [9.0, 1.0, 9.0]


def _shifted(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write x plus what the step's context says, a value that a graph would freeze."""
    out.copy_(x + get_forward_context().attn_metadata)


shifted = direct_register_custom_op(
    "test_shifted", _shifted, mutates_args=["out"], is_composite=True
)


@pytest.mark.feature("X03")
def test_an_op_at_which_a_capture_ends_runs_with_the_context_of_its_step() -> None:
    """Graphs of two sizes in one pool, whatever the other one has left there; and what is between
    breaks is replayed by whoever asks to."""
    pool, x, runs = new_graph_pool(CPU), torch.zeros(4), list[int]()

    def step(n: int) -> torch.Tensor:
        y = x[:n] * 2
        for _ in range(2):
            out = torch.empty_like(y)
            shifted(y, out)
            y = out * 3
        return y + 1

    def run(part: Callable[[], None]) -> None:
        runs.append(1)
        part()

    graphs = {}
    for n in (4, 2):
        graph = new_step_graph(pool, ["lockstep::test_shifted"])
        with forward_context(ForwardContext(attn_metadata=5)):
            output = graph.capture(partial(step, n))
        assert torch.equal(output, torch.full((n,), 3 * (3 * 5 + 5) + 1.0))
        graphs[n] = graph, pool.weak_ref(output)
        del output
    for n, shift, value in [(4, 1, 1.0), (2, 2, 3.0), (4, 4, 2.0)]:
        x.fill_(value)
        graph, output = graphs[n]
        with forward_context(ForwardContext(attn_metadata=shift)):
            graph.replay(run)
            assert torch.equal(output, step(n))
    assert len(runs) >= 3 * 3


@pytest.mark.parametrize("what", ["capture", "replay"])
def test_a_capture_or_a_replay_inside_of_a_capture_is_refused(what: str) -> None:
    x, inner = torch.ones(3), new_graph()
    graph, _ = captured(lambda: x + 1)
    inside = {"capture": lambda: inner.capture(lambda: x + 1), "replay": graph.replay}[what]
    with pytest.raises(CaptureError, match=f"{what}: wanted no capture around it"):
        captured(inside)


FOREIGN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "argument": (
        lambda x: torch.ones(3, device="meta") + 1,
        r"wanted a tensor on cpu, found float32 \[3\] on meta",
    ),
    "output": (lambda x: x.to("meta"), r"wanted a tensor on cpu, found float32 \[3\] on meta"),
    "sparse": (lambda x: SPARSE @ WEIGHT[:3, :3], "wanted a strided tensor"),
    "conjugate": (lambda x: CONJUGATE * 2, "lazy conjugate"),
}
SPARSE, CONJUGATE = torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64).conj()


@pytest.mark.parametrize("what", FOREIGN)
def test_a_tensor_that_the_pool_cannot_address_is_refused(what: str) -> None:
    x = torch.ones(3)
    step, found = FOREIGN[what]
    with pytest.raises(CaptureError, match=found):
        captured(lambda: step(x))


def test_an_output_that_grows_is_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"aten::add .*wanted outputs of their final size"):
        captured(lambda: torch.add(x, 1, out=torch.empty(0)))


def test_a_collective_between_ops_is_refused() -> None:
    x = torch.ones(3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match="wanted a collective inside of an opaque op"):
            captured(lambda: dist.all_reduce(x))
    finally:
        dist.destroy_process_group()


def test_a_graph_that_holds_nothing_cannot_be_replayed() -> None:
    with pytest.raises(ReplayError, match="replay: wanted a captured step, found none"):
        new_graph().replay()


def test_a_failed_capture_leaves_nothing_behind() -> None:
    pool = CpuGraphPool(segment_bytes=1 << 12)
    x = torch.ones(1024)

    def step() -> None:
        kept = x + 1
        raise RuntimeError(f"inside {kept.shape}")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="inside"):
            captured(step, pool)
    assert x.tolist() == [1.0] * 1024
    graph, output = captured(lambda: x + 1, pool)
    graph.replay()
    assert (output[0].item(), pool.num_bytes) == (2.0, 4096)


def test_one_random_draw_per_replay() -> None:
    torch.manual_seed(0)
    wanted = [torch.rand(3).bernoulli() for _ in range(3)]
    torch.manual_seed(0)
    graph, output = captured(lambda: torch.rand(3).bernoulli())
    assert torch.equal(output, wanted[0])
    for draws in wanted[1:]:
        graph.replay()
        assert torch.equal(output, draws)
