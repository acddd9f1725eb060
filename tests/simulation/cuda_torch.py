"""What torch does on a CUDA device, done on the simulated one.

Inside of `simulated` tensors that are asked for on `cuda` lie in memory of the CPU that is noted as
the device's. They say that they lie on `cuda`; ops on them are put into the current stream, and
their results have an address at once and values later. Code under test runs as it is. Two modes of
torch see what it calls: one the functions of Python, which name devices and pinned memory, and one
the ops behind them.

Ops of the project and its filter of logits are one kernel each, as on a GPU. When they run they
find CPU tensors, and the forward context of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_device import (
    FREE_BYTES,
    PAGEABLE,
    PINNED,
    RUBBISH,
    TO_HOST,
    TOTAL_BYTES,
    CudaDevice,
    Event,
    Graph,
    Order,
    Stream,
    alias,
    refuse,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from compile import context as forward
from compile.graphs import cuda as cuda_graphs
from compile.passes import stream_ops
from model import sampler
from model.kernels import drawing
from model.kernels.filters import filter_top_k_top_p

CUDA = torch.device("cuda", 0)
READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
"""Ops for which the host waits, because their result's shape or value is needed on it."""
METADATA = {"detach", "alias", "lift_fresh", "set_"}
"""Ops that compute nothing."""
FROM_HOST = {torch.tensor, torch.as_tensor}
"""Functions that make a tensor of a value of Python, which is copied if it is to be on a device."""


@contextmanager
def unseen() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Ops(TorchDispatchMode):
    """Puts ops on the device's tensors into the current stream."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__()
        self._device = device
        self.makes_device_memory = False
        """The op is called by a function that was given the device."""
        self._metas: dict[Any, Any] = {}
        """What ops return for arguments of these layouts: working it out takes longer than they."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_device = [tensor for tensor in tensors if self._device.holds(tensor)]
        if not on_device and not self.makes_device_memory:
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:  # such ops arrive whole in inference mode
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        name = func._schema.name.split("::")[1]
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        if is_view or name in METADATA:
            return func(*args, **kwargs)
        if name in READS:
            self._device.read(name)
            return func(*args, **kwargs)
        if name == "copy_":
            return self.copy(*args, **kwargs)
        if not self.makes_device_memory:
            args, kwargs = pytree.tree_map(lambda v: self._argument(v, func), (args, kwargs))
        if any(a is not None for a in aliases) or not aliases:
            return self._in_place(func, args, kwargs)
        return self._functional(func, args, kwargs)

    def _argument(self, value: Any, func: Any) -> Any:
        """Return what a kernel is given: of the host numbers alone, by value."""
        if not isinstance(value, torch.Tensor) or self._device.holds(value):
            return value
        if value.ndim:
            refuse(f"{func.name()} of tensors on the device and on the host")
        return value.clone()

    def _in_place(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Put in an op that returns nothing but arguments that it writes into."""
        schema = func._schema
        written: dict[str, Any] = {}
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written[str(argument.alias_info.before_set)] = value
        found = []
        for each in schema.returns:
            if each.alias_info is None:
                refuse(f"{func.name()}, which writes into arguments and returns something else")
            found.append(written[str(each.alias_info.before_set)])
        self.put(func, args, kwargs, [])
        return tuple(found) if len(found) > 1 else found[0] if found else None

    def _functional(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        layouts = (func, self.makes_device_memory, _layout((args, kwargs)))
        if layouts not in self._metas:
            self._metas[layouts] = self._meta(func, args, kwargs)
        metas = self._metas[layouts]
        is_one = isinstance(metas, torch.Tensor)
        with unseen():
            outs = [self._device.allocate(meta) for meta in ([metas] if is_one else metas)]
        if func._schema.name.split("::")[1].startswith(("empty", "new_empty")):
            self._unset(outs)
        else:
            self.put(func, args, kwargs, outs)
        return outs[0] if is_one else type(metas)(outs)

    def _meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with unseen():
            args, kwargs = pytree.tree_map(_as_meta, (args, kwargs))
            if "device" in kwargs or self.makes_device_memory:
                kwargs["device"] = torch.device("meta")
            try:
                return func(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                refuse(f"{func.name()}: {error}")

    def _unset(self, outs: list[torch.Tensor]) -> None:
        """Let each replay find rubbish in memory that its graph does not write."""
        if self._device.capture is not None:
            for out in outs:
                self.put(_fill_with_rubbish, (out,), {}, [])

    def put(self, func: Callable[..., Any], args: Any, kwargs: Any, outs: list[Any]) -> None:
        """Put `outs = func(*args, **kwargs)` into the current stream, or into what it captures."""
        capture = self._device.capture
        if capture is not None:
            with unseen():
                # A graph keeps no memory of its pool in use.
                args, kwargs, outs = pytree.tree_map(_as_alias, (args, kwargs, outs))
        context = forward.current_context()

        def run() -> None:
            with unseen(), torch.inference_mode(), forward.resumed_context(context):
                found = func(*args, **kwargs)
                found = [found] if isinstance(found, torch.Tensor) else found
                for out, value in zip(outs, found or (), strict=False):
                    out.copy_(value)

        if capture is not None:
            capture.add(run)
        else:
            self._device.current.put(run)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """Copy into `target`, on the device or from there.

        Torch copies by itself between the device and pinned memory, if the elements lie in a row on
        both sides. Everything else goes by way of memory of its own.
        """
        if not target.numel():
            return target
        device = self._device
        is_from, is_to = device.holds(source), device.holds(target)
        is_in_a_row = target.is_contiguous() and source.is_contiguous()
        is_plain = is_in_a_row and target.dtype == source.dtype
        if is_to and not is_from and not source.ndim and not target.ndim:
            device.counts[PAGEABLE] += 1
            with unseen():
                source = source.clone()
        elif is_to and not is_from:
            is_pinned = non_blocking and is_plain and device.pinned.holds(source)
            device.counts[PINNED if is_pinned else PAGEABLE] += 1
            if not is_pinned:
                if device.capture is not None:
                    device.wait("a copy of pageable memory")
                with unseen():
                    source = source.clone()
        elif is_from and not is_to:
            device.counts[TO_HOST] += 1
            non_blocking = non_blocking and is_plain and device.pinned.holds(target)
        self.put(torch.Tensor.copy_, (target, source), {}, [])
        if is_from != is_to and not non_blocking:
            device.read("a copy")
        return target


@cache
def _is_composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _layout(value: Any) -> Any:
    """Return what the layout of an op's results depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_layout, value))
    if isinstance(value, dict):
        return tuple((name, _layout(each)) for name, each in value.items())
    return type(value), value


def _as_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _as_alias(value: Any) -> Any:
    return alias(value) if isinstance(value, torch.Tensor) and value.numel() else value


def _fill_with_rubbish(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().fill_(RUBBISH)


class Functions(TorchFunctionMode):
    """Gives functions the CPU where they are given the device, and notes what they make."""

    def __init__(self, device: CudaDevice, ops: Ops) -> None:
        super().__init__()
        self._device, self._ops = device, ops
        self._own: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda t: CUDA,
            torch.Tensor.is_cuda.__get__: lambda t: True,
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: lambda t: self._move(t, "cpu", t.dtype),
            torch.Tensor.tolist: self._to_list,
            torch.Tensor.numpy: lambda t: refuse("numpy of a tensor on the device"),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = self._own.get(func)
        if own is not None and (own == self._to or self._device.holds(args[0])):
            return own(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return self._device.pinned.add(args[0].clone())
        is_pinned = kwargs.pop("pin_memory", False)
        if not is_cuda(kwargs.get("device")):
            found = func(*args, **kwargs)
            if is_pinned:
                self._device.pinned.add(found)
                if func is torch.empty:
                    _fill_with_rubbish(found)
            return found
        kwargs["device"] = torch.device("cpu")
        if func in FROM_HOST:
            made = func(*args, **kwargs)
            return made if self._device.holds(made) else self._move(made, "cuda", made.dtype)
        before, self._ops.makes_device_memory = self._ops.makes_device_memory, True
        try:
            return func(*args, **kwargs)
        finally:
            self._ops.makes_device_memory = before

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = [each for each in args if isinstance(each, str | torch.device)]
        device = kwargs.get("device", named[0] if named else None)
        is_there = self._device.holds(tensor)
        if device is None or is_cuda(device) == is_there:
            if is_there:
                args = tuple(each for each in args if each not in named)
                kwargs.pop("device", None)
                if not args and not kwargs:
                    return tensor
            return torch.Tensor.to(tensor, *args, **kwargs)
        dtypes = [each for each in args if isinstance(each, torch.dtype)]
        dtype = kwargs.get("dtype") or (dtypes[0] if dtypes else tensor.dtype)
        return self._move(tensor, device, dtype, kwargs.get("non_blocking", False))

    def _move(
        self, tensor: torch.Tensor, device: Any, dtype: torch.dtype, non_blocking: bool = False
    ) -> torch.Tensor:
        with unseen():
            if is_cuda(device):
                target = self._device.allocate(torch.empty_like(tensor, dtype=dtype, device="meta"))
            else:
                target = torch.empty_like(tensor, dtype=dtype)
                _fill_with_rubbish(target)
                if non_blocking:  # torch takes pinned memory for these
                    self._device.pinned.add(target)
        return self._ops.copy(target, tensor, non_blocking)

    def _to_list(self, tensor: torch.Tensor) -> Any:
        self._device.read("tolist")
        with unseen():
            return tensor.tolist()


@contextmanager
def simulated(order: Order, seed: int = 0) -> Iterator[CudaDevice]:
    """Stand in for torch's CUDA device: this thread's tensors, and streams, events and graphs."""
    device = CudaDevice(order, seed)
    ops = Ops(device)

    def one_kernel(logits: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        if not device.holds(logits):
            return filter_top_k_top_p(logits, *args)
        with unseen():
            out = device.allocate(torch.empty_like(logits, device="meta"))
        ops.put(filter_top_k_top_p, (logits, *args), {}, [out])
        return out

    def storage_of(pointer: int, _device: torch.device, num_bytes: int) -> torch.UntypedStorage:
        return construct(pointer, torch.device("cpu"), num_bytes)

    def set_device(chosen: torch.device) -> None:
        assert chosen == CUDA, f"{chosen}: there is one device"

    construct = torch._C._construct_storage_from_data_pointer
    stand_ins: dict[str, Any] = {
        "Stream": lambda *_: Stream(device),
        "Event": lambda *_, **__: Event(device),
        "CUDAGraph": lambda: Graph(device),
        "stream": device.stream,
        "set_stream": device.set_stream,
        "current_stream": lambda _=None: device.current,
        "default_stream": lambda _=None: device.default,
        "set_device": set_device,
        "synchronize": device.synchronize,
        "graph_pool_handle": device.new_pool,
        "memory_snapshot": device.snapshot,
        "mem_get_info": lambda _=None: (FREE_BYTES, TOTAL_BYTES),
        "memory_reserved": lambda _=None: 0,
        "max_memory_reserved": lambda _=None: 0,
        "reset_peak_memory_stats": lambda _=None: None,
        "empty_cache": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stand_ins.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_construct_storage_from_data_pointer", storage_of)
        kernels = SimpleNamespace(
            draw=partial(drawing.draw, filter_logits=one_kernel), penalise=drawing.penalise
        )
        patch.setattr(sampler, "kernels_for", lambda _: kernels)
        patch.setattr(stream_ops, "own", stream_ops.PerThread())
        cuda_graphs._side_stream.cache_clear()
        try:
            with Functions(device, ops), ops:
                yield device
        finally:
            cuda_graphs._side_stream.cache_clear()
