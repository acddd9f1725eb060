"""Puts an engine together from its configuration and a runner."""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.engine.blocks import BlockManager
from cluster.engine.engine import Channel, Engine
from cluster.engine.engine import Lockstep as LockstepProtocol
from cluster.engine.scheduler import Scheduler
from cluster.kv.handoff import HandoffMetadata, Holder, KVReader
from cluster.rank.channel import NoFollowers
from cluster.rank.lockstep import Lockstep
from cluster.rank.runner import ModelRunner


def assemble_engine(
    config: EngineConfig,
    runner: ModelRunner,
    *,
    epoch: int = 0,
    channel: Channel | None = None,
    lockstep: LockstepProtocol | None = None,
    holder: Holder | None = None,
    metadata: HandoffMetadata | None = None,
    reader: KVReader | None = None,
) -> Engine:
    """Return the engine of a leader.

    Args:
        channel: leads to the tensor-parallel followers; None where there are none.
        lockstep: with the other data-parallel leaders; None where there are none.
        holder, metadata: where a prefill engine keeps its tickets, and what it writes into them.
        reader: what reads KV for a decode engine.
    """
    cache, model = config.cache, runner.model_config
    scheduler = Scheduler(
        config.scheduler,
        max_model_len=config.max_model_len,
        role=config.role,
        blocks=BlockManager(
            runner.num_blocks,
            cache.block_size,
            cache.enable_prefix_caching,
            sliding_window=model.kv_window,
        ),
        epoch=epoch,
        holder=holder,
        metadata=metadata,
        reader=reader,
        vocab_size=runner.model_config.vocab_size,
        max_prompt_len=model.max_prompt_len,
    )
    lockstep = lockstep or Lockstep.alone(runner.forward.captured)
    return Engine(scheduler, lockstep, channel or NoFollowers(), runner)
