"""The device that a rank computes on: `cuda:0` in every process that has a GPU, whichever it is.

Ray gives each rank a GPU of its node, or a part of one. Left alone it also hides all others, and
then no peer's memory can be mapped (CUDA IPC, symmetric memory). So ranks are started with
`RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`, and each orders `CUDA_VISIBLE_DEVICES` itself before
it loads torch: its own GPU first, then the node's others.

Why the order differs between ranks, instead of the index that each of them uses:

- Inductor writes the index into the code that it generates (`_DeviceGuard(0)`, `set_device(0)`,
  `get_raw_stream(0)`, the properties of each Triton kernel): code for `cuda:0` cannot run on
  `cuda:1`. With one index for all, what a rank compiles serves every other, and the cache's key
  needs no index.
- A thread that names no device computes on index 0. Those that move KV, copy outputs or compile
  would otherwise hold a context on the first rank's GPU.
- Of a GPU's MIG instances CUDA shows a process the first of its list alone.

NCCL knows devices by their place on the bus and sees no difference. torch's symmetric memory maps
what peers export on the caller's own device, by handles and not by index. It only refuses ranks of
one host with equal indices, as a guard against two on one GPU, which
`TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES` lifts; NCCL itself refuses those. The price: with it,
torch's `CUDA` backend of symmetric memory sets up no multicast, so `symm_mem::multimem_*` cannot be
used over it, `one_shot_*` and `two_shot_*` can.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from compile.errors import FieldError, Words

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
VISIBLE = "CUDA_VISIBLE_DEVICES"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Memory in huge pages, where Linux gives them to a process that asks: weights are read faster."""
OWN_GPU = "cuda:0"


@dataclass(frozen=True)
class RankDevice:
    """Invariant: equal on all ranks of a group but for `gpu`."""

    name: str
    """As `torch.device` takes it, a GPU's with its index."""
    gpu: str = ""
    """Which of its node's GPUs it is, as Ray and `CUDA_VISIBLE_DEVICES` call it: an index in CUDA's
    order of them, a UUID or a MIG instance. Empty for a CPU, and for a process that Ray gave none
    but the one that started it."""

    @classmethod
    def of(cls, kind: str, gpu: str = "") -> RankDevice:
        """Return the device of a process for `device=kind`."""
        return cls(OWN_GPU if kind == "cuda" else kind, gpu)


def environment_of_ranks(num_gpus: float) -> dict[str, str]:
    """Return the variables that Ray must start ranks with which reserve so many GPUs each;
    those that reserve none compute on a CPU."""
    if num_gpus:
        return {NOSET: "1"}
    return {} if TUNABLES in os.environ else {TUNABLES: HUGE_PAGES}


def take_gpu(
    ids: Sequence[str], num_on_node: int, environment: MutableMapping[str, str] = os.environ
) -> RankDevice:
    """Make the GPU that Ray gave this process its first, before torch is loaded, and return it.

    ids: Ray's, of which there must be one. If `CUDA_VISIBLE_DEVICES` was set where the node's Ray
    was started, Ray numbers within it and gives back what stands there; else ids are indices below
    `num_on_node`, the GPUs that Ray has there. A `FieldError` names what cannot be used."""
    if len(ids) != 1:
        wanted = "one GPU of Ray for each rank, or a part of one"
        raise FieldError("num_gpus", wanted, Words(", ".join(ids) or "none"))
    own, visible = ids[0].strip(), environment.get(VISIBLE)
    if visible is None:
        if not own.isdecimal():
            wanted = f"a list with {own} where Ray is started, since Ray calls a GPU so"
            raise FieldError(VISIBLE, wanted, Words("none"))
        listed = [str(index) for index in range(num_on_node)]
    else:
        listed = [each.strip() for each in visible.split(",")]
        if own not in listed:
            raise FieldError(VISIBLE, f"a list with {own}, the GPU that Ray gave", visible)
    others = [each for each in listed if each != own]
    # Of MIG instances a process sees one.
    environment[VISIBLE] = own if own.startswith("MIG-") else ",".join([own, *others])
    environment.setdefault(OVERLAPPING, "1")
    return RankDevice.of("cuda", own)
