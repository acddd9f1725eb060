"""What a rank's model is compiled with: the scope that it is built in, and its part of the cache's
key. What is left out of the key must not change generated code: ranks, ports, paths, sizes of
graphs."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import torch

import model
from cluster.config import EngineConfig
from cluster.engine.compile_switch import CannotCompile
from cluster.group.context import RankContext
from cluster.group.membership import GroupMembership
from compile.cache.key import sources_hash
from compile.config import AttentionGraphSupport, CompilationConfig, CompilationLevel
from compile.environment import cc, cxx
from compile.errors import FieldError
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.pieces.diagnose import GraphBreakError, TraceError
from compile.pieces.split import PieceInvariantError
from compile.resolve import PRESETS, resolve
from compile.scope import CompileScope
from model.adapters import traced_layout
from model.config import ModelConfig
from model.kernels.cpu.packed_linear import can_pack
from model.parallel import Shard

log = logging.getLogger("lockstep.compile")

MODEL_SOURCES = sources_hash(Path(model.__file__).parent)
"""When they were imported: a file that is changed later does not run here."""
ATTENTION = AttentionGraphSupport.ALWAYS
"""A graph freezes how many sequences decode: in a full graph of a mixed step all are chunks."""


def graph_pools(config: CompilationConfig, device: torch.device) -> GraphPools:
    new_pool = partial(new_graph_pool, device, poison=config.poison_graph_pool)
    return GraphPools(new_pool, policy=config.graph_pool)


def rank_scope(context: RankContext, group: GroupMembership, pools: GraphPools) -> CompileScope:
    """Return the scope that a rank's model is built in: equal on all ranks but for their places."""
    config, progress = context.config, context.progress
    if config.device == "cuda" and (missing := missing_for_triton()):
        log.warning(
            "device: this machine cannot build what Triton has not cached: it lacks %s", missing
        )
    resolved = resolve(
        config.compilation,
        config.step_limits,
        preset=PRESETS[config.role.value],
        enforce_eager=not _can_compile(config, group),
        attention=ATTENTION,
        backend_name=f"paged attention on {config.device}",
        device=config.device,
    )
    return CompileScope(
        config=resolved,
        tp_rank=group.shard.rank,
        dp_rank=context.place.dp_rank,
        key_factors=_key_factors(context, group.shard),
        pools=pools,
        progress=None if progress is None else partial(progress, "compiling"),
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        exchange=context.exchange,
    )


def _can_compile(config: EngineConfig, group: GroupMembership) -> bool:
    wanted = config.compilation
    needs_compiler = (
        config.device == "cpu"
        and wanted.has_inductor
        and wanted.level >= CompilationLevel.DYNAMO_ONCE
    )
    if not needs_compiler:
        return True
    is_here = shutil.which(cxx()) is not None
    # A rank that runs eagerly would pad its steps unlike its peers, and they would wait for it.
    if group.all_reduce_min("has_compiler", int(is_here)):
        return True
    log.warning(
        "compilation.level: serving at level 0, wanted level %d: no C++ compiler (%s) %s",
        wanted.level,
        cxx(),
        "is found on another rank" if is_here else "is found",
    )
    return False


def as_final(error: BaseException) -> CannotCompile | None:
    """Return the error of which every start would end, if this is one and not the machine's."""
    # Imported once there is an error: they take seconds.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    is_final, chain = False, [error]
    for each in chain:
        if isinstance(each, OSError | MemoryError | CppCompileError):
            return None
        # Inductor's errors are Dynamo's as well.
        ours = (GraphBreakError, PieceInvariantError, TraceError)
        is_final |= isinstance(each, (*ours, TorchDynamoException))
        is_final |= isinstance(each, FieldError) and each.field.startswith("compilation.")
        inner = (getattr(each, "inner_exception", None), each.__cause__, each.__context__)
        chain += [found for found in inner if found is not None and found not in chain]
    return CannotCompile(one_line(error)) if is_final else None


def one_line(error: BaseException) -> str:
    """Return an error's first line, with its type unless the line names a field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, FieldError):
        return str(error)
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def missing_for_triton() -> str:
    """Return what the machine lacks for Triton, which builds extensions to launch kernels."""
    compilers, missing = cc(), []
    if not any(shutil.which(name) for name in compilers):
        missing.append(f"a C compiler, {' or '.join(compilers)} (Debian: gcc)")
    headers = Path(sysconfig.get_paths("posix_prefix")["include"])
    if not (headers / "Python.h").exists():
        missing.append(f"{headers}/Python.h (Debian: python3-dev)")
    return " and ".join(missing)


def _key_factors(context: RankContext, shard: Shard) -> dict[str, str]:
    config = context.config
    dtype, device = getattr(torch, config.dtype), torch.device(context.device.name)
    parallel = config.parallel
    return {
        "model_config": repr(ModelConfig.from_dir(config.model_path)),
        "dtype": config.dtype,
        # Its index is the same on all ranks, so the key needs none.
        "device_type": config.device,
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "data_parallel_size": str(parallel.data_parallel_size),
        "group": shard.group_name,
        "data_group": "" if shard.data is None else shard.data.group_name,
        # What a constructor decides is in the graph, and constructors are not traced.
        "model_sources": MODEL_SOURCES,
        "adapters": traced_layout(config.lora_paths, config.num_lora_slots, config.max_lora_rank),
        "packed_weights": str(can_pack(dtype, device)),
        "quantization": config.quantization,
    }
