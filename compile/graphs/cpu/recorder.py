"""Step graphs on CPU: a step is run once, recorded call by call, and replayed from fixed addresses.

The speed of a replay says nothing about CUDA graphs. What it repeats is a flat list of calls with
frozen arguments. Ops are seen through a dispatch mode, compiled pieces and kernels through
`boundary`; the inside of a piece or of an opaque op is one call, runs without modes and may read
what it likes.

1. Each op that is not an allocation or a view becomes a call. Composite ops are taken apart first:
   of them a replay makes the kernels' calls alone, bound to addresses.
2. Fresh outputs move into the pool. A replay writes there again: by the op's `out=` form if it
   has one, else by a copy.
3. When the step lets go of a pool tensor, its block is free, and a call that poisons it follows.

A graph owns no tensor. Tensors from outside of the pool are watched. When one dies, the graph is
unusable, because the memory that it lay in may hold anything now; on a GPU nothing would notice.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from compile.context import ForwardContext, ReplayPart, current_context, resumed_context
from compile.custom_op import composite_of, function_of
from compile.errors import CaptureError, ReplayError
from compile.graphs import boundary
from compile.graphs.boundary import CaptureMode, map_tensors, rebuild, tensors_of
from compile.graphs.cpu.pool import Block, CpuGraphPool, poison_value, view_of

aten = torch.ops.aten

ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
COPIES = {"aten::clone", "aten::_to_copy"}
# They end when they are waited for, and waiting is no op.
COLLECTIVES = {"c10d", "_c10d_functional"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}

T = TypeVar("T")
Call = Callable[[], Any]


class _PerThread(threading.local):
    is_capturing = False


_state = _PerThread()


class CpuStepGraph:
    """One captured step: calls in order, by the forward context that they run under. Arguments,
    host values and the forward context are those of the capture, as in a CUDA graph. Invariant: it
    owns no tensor but scalars that the step made from host values."""

    def __init__(self, pool: CpuGraphPool, breaks: Collection[str] = ()) -> None:
        self._pool = pool
        self._breaks = breaks
        self._recorder: Recorder | None = None
        self._is_inference = False

    def capture(self, fn: Callable[[], T]) -> T:
        """Run `fn` and record it; return its result, whose fresh tensors lie in the pool. Raises
        CaptureError if `fn` does what a replay cannot repeat, ReplayError if it made a tensor
        outside of the pool that is gone."""
        recorder = Recorder(self._pool, self._breaks)
        with _capturing(), torch.no_grad(), recorder.active():
            result = fn()
        recorder.collect()
        self._recorder, self._is_inference = recorder, torch.is_inference_mode_enabled()
        recorder.check_alive()
        return result

    def replay(self, run: ReplayPart = operator.call) -> None:
        """Run the step again; ReplayError: none was captured, or a tensor that it reads is gone."""
        if _state.is_capturing:
            raise CaptureError("replay", "no capture around it", "one on this thread")
        if self._recorder is None:
            raise ReplayError("replay", "a captured step", "none")
        self._recorder.check_alive()
        with torch.inference_mode(self._is_inference), torch.no_grad():
            for part in self._recorder.parts:
                if isinstance(part, Recorded):
                    run(part.replay)
                else:
                    part()


@contextmanager
def _capturing() -> Iterator[None]:
    if _state.is_capturing:
        raise CaptureError("capture", "no capture around it", "one on this thread")
    _state.is_capturing = True
    try:
        yield
    finally:
        _state.is_capturing = False


@dataclasses.dataclass
class Recorded:
    """Calls in a row that run under one forward context."""

    context: ForwardContext | None
    calls: list[Call] = dataclasses.field(default_factory=list)

    def replay(self) -> None:
        with resumed_context(self.context):
            for call in self.calls:
                call()


class Recorder:
    """Records the calls of one step. Invariant: of the pool's tensors it holds only aliases."""

    def __init__(self, pool: CpuGraphPool, breaks: Collection[str] = ()) -> None:
        """`breaks`: names of ops that a replay calls with its own forward context."""
        self._pool = pool
        self._breaks = breaks
        self._freezer = Freezer(pool)
        self._modes = Modes(self.op)
        self.parts: list[Recorded | Call] = []
        self._context: ForwardContext | None = None
        self._placed: dict[Block, torch.dtype] = {}
        self._constants: list[torch.Tensor] = []
        """Scalars that the step made from host values: a graph has them by value."""

    @contextmanager
    def active(self) -> Iterator[None]:
        try:
            with boundary.recording(self), self._modes.on():
                yield
        finally:
            # They may hold tensors, and garbage may not be collected soon.
            self._context = None
            del self._modes

    def check_alive(self) -> None:
        if self._freezer.dead:
            wanted = "tensors from outside of the pool to outlive the graph"
            raise ReplayError("replay", wanted, f"{self._freezer.dead[0]} is gone")

    # --- what is recorded -------------------------------------------------------------------

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._modes.off(), boundary.recording(None):
            return self._record(fn, args, {}, getattr(fn, "__qualname__", type(fn).__name__))

    def bound(self, call: functools.partial[Any], tensors: tuple[torch.Tensor | None, ...]) -> Any:
        with self._modes.off():
            self.collect()
            self._freezer.freeze(tensors, call.func.__name__)
            found = call()
            if found is not False:
                self._append(call)
            return found

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.name().partition(".")[0]
        if name in self._breaks:
            return self._run_between(func, name, args, kwargs)
        composite = composite_of(func, "cpu") or _composite(func)
        if composite is not None:
            with self._modes.off(), self._modes.dispatching():
                return composite(*args, **kwargs)
        _check(func, name, args, kwargs)
        with self._modes.off(), boundary.recording(None):
            if name in ALLOCATIONS:
                self.collect()
                return self._place(func(*args, **kwargs), set())[0]
            if name == "aten::lift_fresh":
                # A scalar that the step made from a host value; larger ones it keeps itself.
                if (lifted := func(*args, **kwargs)).dim() == 0:
                    self._constants.append(lifted)
                return lifted
            if torch.Tag.inplace_view in func.tags:
                return func(*args, **kwargs)
            return self._record(func, args, kwargs, name)

    def _run_between(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with self._modes.off(), boundary.recording(None):
            self.collect()
            frozen = self._freezer.freeze(args, name), self._freezer.freeze(kwargs, name)
            fn = function_of(func, "cpu") or func
            fn(*args, **kwargs)
            self.parts.append(functools.partial(fn, *frozen[0], **frozen[1]))

    def _record(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Any:
        self.collect()
        inputs = tensors_of((args, kwargs))
        for tensor in inputs:
            check_addressable(tensor, self._pool.device, f"an argument of {name}")
        addresses = [t.untyped_storage().data_ptr() for t in inputs]
        found = fn(*args, **kwargs)
        if addresses != [t.untyped_storage().data_ptr() for t in inputs]:
            raise CaptureError(f"{name} at {where()}", "outputs of their final size", "a resize")
        result, targets = self._place(found, set(addresses))
        _copy(found, targets)
        if _has_effect(fn, targets):
            what = f"{name} at {where()}"
            frozen = self._freezer.freeze(args, what), self._freezer.freeze(kwargs, what)
            self._append(_call(fn, name, *frozen, found, targets))
        return result

    def _place(self, value: Any, known: set[int]) -> tuple[Any, list[torch.Tensor | None]]:
        """Give every fresh tensor of `value` memory in the pool; what shares memory still does.
        Returns the value with those tensors, and for each the alias that a replay must fill."""
        storages: dict[int, torch.UntypedStorage] = {}
        targets: list[torch.Tensor | None] = []

        def place(tensor: torch.Tensor) -> torch.Tensor:
            check_addressable(tensor, self._pool.device, "an output")
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if tensor.numel() == 0 or address in known or self._pool.owns(tensor):
                targets.append(None)
                return tensor
            if address not in storages:
                storages[address] = self._allocate(storage.nbytes(), tensor.dtype)
            placed = view_of(storages[address], tensor)
            targets.append(self._pool.alias(placed))
            return placed

        return map_tensors(place, value), targets

    # --- memory -------------------------------------------------------------------------------

    def _allocate(self, num_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        block, storage = self._pool.place(num_bytes)
        self._placed[block] = dtype
        if self._pool.poison:
            self._poison(block)()
        return storage

    def collect(self) -> None:
        """Free what the step let go of since the last call, and poison it in replays."""
        for block in self._pool.reclaim():
            if block in self._placed and self._pool.poison:
                self._append(self._poison(block))
            self._placed.pop(block, None)

    def _poison(self, block: Block) -> Call:
        dtype = self._placed[block]
        # Blocks are multiples of the largest element's size.
        memory = self._pool.bytes_of(block).view(dtype)
        return functools.partial(aten.fill_.Scalar, memory, poison_value(dtype))

    def _append(self, call: Call) -> None:
        context = current_context()
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, Recorded) or context is not self._context:
            self.parts.append(last := Recorded(self._freezer.context(context)))
            self._context = context
        last.calls.append(call)


# --- how a step is seen: the ops that are dispatched, and reads for which none is -----------------


class Modes:
    """Both modes, which opaque code must not see. Invariant: `_entered` are those on torch's stacks
    now. Torch takes a mode off its stack while the mode handles a call, but leaves the other kind
    on."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        """Hand each op to `handle`, as function, arguments and keyword arguments."""
        self._dispatch = _Dispatch(handle, self)
        self._reads = _Reads(self)
        self._entered: list[_Dispatch | _Reads] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._on(self._reads), self._on(self._dispatch):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave those that are entered, and enter them again."""
        with ExitStack() as stack:
            for mode in list(self._entered):
                stack.enter_context(self._off(mode))
            yield

    @contextmanager
    def dispatching(self) -> Iterator[None]:
        """Record the ops that an op calls while it is handled."""
        with self._on(self._dispatch):
            yield

    @contextmanager
    def handling(self, mode: _Dispatch | _Reads) -> Iterator[None]:
        """Note that torch took a mode off its stack."""
        self._entered.remove(mode)
        try:
            yield
        finally:
            self._entered.append(mode)

    @contextmanager
    def _on(self, mode: _Dispatch | _Reads) -> Iterator[None]:
        with mode:
            self._entered.append(mode)
            try:
                yield
            finally:
                self._entered.remove(mode)

    @contextmanager
    def _off(self, mode: _Dispatch | _Reads) -> Iterator[None]:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            with self.handling(mode):
                yield
        finally:
            mode.__enter__()  # type: ignore[no-untyped-call]


class _Dispatch(CaptureMode):
    def __init__(self, handle: Callable[..., Any], stack: Modes) -> None:
        CaptureMode.__init__(self)
        self._handle = handle
        self._stack = stack

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._stack.handling(self):
            return self._handle(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Refuses the reads that no op is dispatched for, addresses for native code included."""

    refused = (
        torch.Tensor.data_ptr,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
    )

    def __init__(self, stack: Modes) -> None:
        TorchFunctionMode.__init__(self)
        self._stack = stack

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.refused:
            raise value_read(func.__name__)
        with self._stack.handling(self):
            return func(*args, **(kwargs or {}))


def value_read(name: str) -> CaptureError:
    return CaptureError(f"{name} at {where()}", "tensors that stay tensors", "a value read")


def where() -> str:
    hidden = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*hidden, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


# --- calls --------------------------------------------------------------------------------------


def _has_effect(fn: Any, targets: list[torch.Tensor | None]) -> bool:
    """Return whether a replay must repeat a call: views and sizes stay as they are."""
    schema = getattr(fn, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return True
    return any(target is not None for target in targets)


def _call(
    fn: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Any,
    targets: list[torch.Tensor | None],
) -> Call:
    fn = function_of(fn, "cpu") or fn
    target = targets[0] if isinstance(found, torch.Tensor) else None
    if target is not None and name in COPIES:
        return functools.partial(aten.copy_.default, target, args[0])
    out = _out_form(fn) if target is not None and _dense(target) is target else None
    if out is not None:
        return functools.partial(out, *args, **kwargs, out=target)
    call = functools.partial(fn, *args, **kwargs)
    if not any(target is not None for target in targets):
        return call
    if isinstance(found, tuple | list) and all(type(item) is torch.Tensor for item in found):
        places = [(i, target) for i, target in enumerate(targets) if target is not None]
        if all(found[i].is_contiguous() and target.is_contiguous() for i, target in places):
            moves = [(i, target.data_ptr(), target.nbytes, target) for i, target in places]
            return functools.partial(_call_and_move, call, moves)
    return functools.partial(_call_and_copy, call, targets)


def _call_and_move(call: Call, moves: list[tuple[int, int, int, torch.Tensor]]) -> None:
    """Copy small outputs without the dispatcher, which takes longer than copying. `moves`: for each
    output its place, the address and bytes it goes to, and the tensor there."""
    found = call()
    for i, address, num_bytes, target in moves:
        source = found[i]
        if source.is_contiguous():
            ctypes.memmove(address, source.data_ptr(), num_bytes)
        else:
            target.copy_(source)


def _call_and_copy(call: Call, targets: list[torch.Tensor | None]) -> None:
    _copy(call(), targets)


def _copy(found: Any, targets: list[torch.Tensor | None]) -> None:
    for source, target in zip(tensors_of(found), targets, strict=True):
        if target is not None:
            _dense(target).copy_(_dense(source))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of an expanded tensor that has each element once."""
    if 0 in tensor.stride():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


@functools.cache
def _out_form(fn: Any) -> Any:
    """Return the overload of an ATen op that takes the same arguments and `out`, if any."""
    if getattr(fn, "namespace", "") != "aten":
        return None
    wanted = [(arg.name, str(arg.type)) for arg in fn._schema.arguments]
    for overload in fn.overloadpacket.overloads():
        form = getattr(fn.overloadpacket, overload)
        given = [(arg.name, str(arg.type)) for arg in form._schema.arguments]
        if given == [*wanted, ("out", "Tensor")]:
            return form
    return None


# --- what is refused ----------------------------------------------------------------------------


def _check(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func.namespace in COLLECTIVES:
        raise CaptureError(f"{name} at {where()}", "a collective inside of an opaque op", name)
    if _reads_values(func, name, args, kwargs):
        raise value_read(name)


def _reads_values(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op's result, or its shape, depends on values: on a GPU it would wait."""
    if name in INDEXING:
        has_mask = any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(args[1]))
        # One value in all masked places needs no index.
        return has_mask and not (len(args) > 2 and args[2].numel() == 1)
    if torch.Tag.dynamic_output_shape in func.tags:
        return kwargs.get("output_size") is None
    return torch.Tag.data_dependent_output in func.tags


@functools.cache
def _composite(func: Any) -> Callable[..., Any] | None:
    """Return the kernel of an ATen op that calls other ops, which in inference mode arrives whole.
    `OpOverload.decompose` would prefer Python kernels, whose sums may run in another order."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return functools.partial(func._op_dk, key) if has_kernel and func.namespace == "aten" else None


class Freezer:
    """Freezes arguments and contexts. Invariant: `dead` describes the tensors that are gone."""

    def __init__(self, pool: CpuGraphPool) -> None:
        self._pool = pool
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.dead: list[str] = []

    def freeze(self, value: Any, name: str) -> Any:
        """Return `value` as a replay will see it: containers copied, tensors as aliases."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, tuple | list):
            items = [self.freeze(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return rebuild(value, items)
        if isinstance(value, dict):
            return {key: self.freeze(item, f"{name}[{key!r}]") for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, name)
        return value

    def context(self, value: ForwardContext | None) -> ForwardContext | None:
        frozen: ForwardContext | None = self.freeze(value, "forward context")
        return frozen

    def _dataclass(self, value: Any, name: str) -> Any:
        frozen = copy.copy(value)
        for field in dataclasses.fields(value):
            item = self.freeze(getattr(value, field.name), f"{name}.{field.name}")
            object.__setattr__(frozen, field.name, item)
        return frozen

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        check_addressable(tensor, self._pool.device, name)
        storage, dead = tensor.untyped_storage(), self.dead
        address = storage.data_ptr()
        if tensor.numel() and address not in self._watched and not self._pool.owns(tensor):
            found = f"{name}: {describe(tensor)}"
            # Torch keeps a storage's Python object as long as the storage: this is its death.
            self._watched[address] = weakref.ref(storage, lambda _: dead.append(found))
        return self._pool.alias(tensor)


def check_addressable(tensor: torch.Tensor, device: torch.device, name: str) -> None:
    if tensor.device.type != device.type:
        raise CaptureError(name, f"a tensor on {device}", describe(tensor))
    if tensor.layout is not torch.strided:
        raise CaptureError(name, "a strided tensor", describe(tensor))
    if tensor.is_conj() or tensor.is_neg():
        found = f"a lazy conjugate or negative: {describe(tensor)}"
        raise CaptureError(name, "a tensor whose memory holds its values", found)


def describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{dtype} {list(tensor.shape)} on {tensor.device}{layout}"
