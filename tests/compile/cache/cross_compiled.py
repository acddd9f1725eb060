"""One piece for sm_90 on a machine without a GPU; run by test_tuned_kernels.py.

    python cross_compiled.py compile CACHE_DIR COMPILER
    python cross_compiled.py load CACHE_DIR COMPILER HANDLE

Inductor lowers the piece, Triton builds its two kernels, the compiler bundles, saves and loads
them. No kernel runs. What tuning would find is the last of a kernel's configurations: `compile`
saves it for the first kernel as soon as that is built, as tuning while compiling does, and for the
second one behind the compile, as the first call does. The last line is JSON: the handle, what was
saved, the configurations of the kernels that are left, and counts of what was compiled and built.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import types
from typing import Any

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from compile.cache.inductor import InductorAdaptor, StandaloneInductorAdaptor
from compile.counters import counter

SHARED_BYTES = 227 << 10
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=SHARED_BYTES,
    shared_memory_per_multiprocessor=228 << 10,
    gcnArchName="",
    uuid="0",
    is_integrated=0,
    is_multi_gpu_board=0,
)


class Driver:
    """Triton's driver of an H100 that launches nothing."""

    launcher_cls = staticmethod(lambda *_: lambda *_, **__: None)
    utils = types.SimpleNamespace(
        load_binary=lambda *_: (0, 0, 32, 0, 1024),
        get_device_properties=lambda _: {
            "max_shared_mem": SHARED_BYTES,
            "multiprocessor_count": H100.multi_processor_count,
            "max_num_regs": H100.regs_per_multiprocessor,
            "warpSize": H100.warp_size,
        },
    )

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _device: 0)
    set_current_device = staticmethod(lambda _device: None)
    get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
    is_active = staticmethod(lambda: True)


def stand_in() -> None:
    """Answer for the device where torch, Inductor and Triton would ask it."""
    cuda: Any = torch.cuda
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": H100,
        "get_device_capability": (9, 0),
        "get_device_name": H100.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("synchronize", "set_device", "set_rng_state", "_lazy_init"):
        setattr(cuda, name, lambda *_, **__: None)
    bindings: Any = torch._C
    bindings._cuda_getDevice = lambda: 0
    bindings._cuda_getCurrentRawStream = lambda _: 0
    fake: Any = fake_tensor
    fake.init_gpu_context = lambda _: None
    # Inductor binds the device's functions when it is imported.
    helpers: Any = importlib.import_module("torch._inductor.runtime.triton_helpers")
    helpers.set_driver_to_gpu = lambda: None
    # Patterns that this piece has not, traced on real tensors of the device.
    passes: Any = importlib.import_module("torch._inductor.fx_passes.joint_graph")
    passes.lazy_init = lambda *_: None
    driver.set_active(Driver())

    def load_kernel(self: Any, _device: int) -> None:
        self.function, self.n_regs, self.n_spills = 1, 32, 0

    launchers = importlib.import_module("torch._inductor.runtime.static_triton_launcher")
    for launcher in vars(launchers).values():
        if isinstance(launcher, type) and hasattr(launcher, "load_kernel"):
            setattr(launcher, "load_kernel", load_kernel)  # noqa: B010


def piece(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """Two products, and behind each what Inductor writes a kernel for."""
    hidden = torch.sigmoid(torch.matmul(x, weight) * 2) + x
    return (torch.tanh(torch.matmul(hidden, weight)) * x,)


def is_first(kernel: Any) -> bool:
    return "sigmoid" in kernel.fn.__name__


def save_last(kernel: Any, tuned: dict[str, str]) -> None:
    """Save a kernel's last configuration, as tuning does, if it has several; note it in `tuned`."""
    if len(kernel.compile_results) > 1:
        config = kernel.compile_results[-1].config
        kernel.save_cache_hook(config, 0)
        tuned[kernel.fn.__name__] = str(config)


def tune_first_while_compiling(tuned: dict[str, str]) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    build = CachingAutotuner.precompile

    def build_and_tune(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        is_compiling = kwargs["static_triton_bundle_key"] is not None
        if is_compiling and is_first(self):
            save_last(self, tuned)

    CachingAutotuner.precompile = build_and_tune  # type: ignore[method-assign]


def kernels() -> list[Any]:
    """Return the kernels that can be called; loading leaves copies that nothing calls."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found = [value for value in gc.get_objects() if type(value) is CachingAutotuner]
    return [kernel for kernel in found if kernel.launchers]


def compiled(adaptor: InductorAdaptor) -> list[str]:
    """Compile and save the piece; return its handle."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.empty(8, 256, device="cuda:0", dtype=torch.bfloat16)
        weight = torch.empty(256, 256, device="cuda:0", dtype=torch.bfloat16)
    # A lambda has no annotations, which as text could not be saved.
    graph = fx.symbolic_trace(lambda x, weight: piece(x, weight))
    for node, value in zip(graph.graph.nodes, (x, weight), strict=False):
        node.meta["val"] = node.meta["example_value"] = value
    # Tuning itself takes a device.
    options = {"size_asserts": False, "triton.autotune_at_compile_time": False}
    _, handle = adaptor.compile(graph, [x, weight], options, key="key")
    assert handle is not None, "the piece was not saved"
    return list(handle)


def main() -> None:
    task, cache_dir, compiler, *handle = sys.argv[1:]
    stand_in()
    is_standalone = compiler == StandaloneInductorAdaptor.name
    adaptor = StandaloneInductorAdaptor() if is_standalone else InductorAdaptor()
    os.makedirs(f"{cache_dir}/artifacts", exist_ok=True)
    adaptor.initialize_cache(f"{cache_dir}/artifacts")
    tuned: dict[str, str] = {}
    if task == "compile":
        tune_first_while_compiling(tuned)
        handle = compiled(adaptor)
        for kernel in kernels():
            if not is_first(kernel):
                save_last(kernel, tuned)
    else:
        loaded = adaptor.load((handle[0], handle[1]))
        assert loaded is not None
    configs = {k.fn.__name__: [str(r.config) for r in k.compile_results] for k in kernels()}
    counts = {
        "num_inductor_compiles": counter.num_inductor_compiles,
        "num_triton_builds": counter.num_triton_builds,
    }
    print(json.dumps({"handle": handle, "tuned": tuned, "configs": configs, "counts": counts}))


if __name__ == "__main__":
    main()
