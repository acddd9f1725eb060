"""The ranks of a group as Ray actors, one in each bundle of its placement group."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors.placement import bundles_by_node
from cluster.actors.rank_actor import RemoteRank
from cluster.actors.rank_group import CallEnd, RankGroup, places_of
from cluster.config import EngineConfig
from cluster.group.device import environment_of_ranks
from cluster.group.rendezvous import Rendezvous
from cluster.observe.logs import last_line
from cluster.wire.credentials import Credentials
from cluster.wire.messages import LoraAdapter

log = logging.getLogger("lockstep.group")


class RayRank:
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def meet(self) -> Awaitable[CallEnd]:
        return self._call("step", "meet")

    def load(self, rendezvous: Rendezvous | None) -> Awaitable[CallEnd]:
        return self._call("step", "load", rendezvous)

    def run(self) -> Awaitable[CallEnd]:
        return self._call("step", "run")

    def heartbeat(self) -> Awaitable[CallEnd]:
        return self._call("ctl", "heartbeat")

    def stats(self, prefixes_since: int | None) -> Awaitable[CallEnd]:
        return self._call("ctl", "stats", prefixes_since)

    def set_adapters(self, adapters: Sequence[LoraAdapter]) -> Awaitable[CallEnd]:
        return self._call("ctl", "set_adapters", adapters)

    def stop(self) -> None:
        self.actor.stop.options(concurrency_group="ctl").remote()

    def _call(self, group: str, method: str, *args: Any) -> Awaitable[CallEnd]:
        call = getattr(self.actor, method).options(concurrency_group=group)
        return end_of(call.remote(*args))

    def kill(self) -> None:
        ray.kill(self.actor)


async def end_of(ref: Any) -> CallEnd:
    try:
        return CallEnd(await ref)
    except ray.exceptions.RayError as error:
        raised = getattr(error, "cause", None) or error
        if raised is not error:
            raised.add_note(str(error))  # which has the traceback of the rank
        is_death = isinstance(error, ray.exceptions.RayActorError)
        return CallEnd(None, last_line(error), raised, is_death)


def create_group(
    config: EngineConfig,
    placement_group: PlacementGroup,
    *,
    first_bundle: int,
    engine_id: str,
    credentials: Credentials,
    epoch: int = 0,
    clients_node: str = "",
) -> RankGroup:
    """Create a group's actors, which wait to be told to load, from bundle `first_bundle` on.
    clients_node: the only node from which anything connects to them, if there is just one."""
    places = places_of(config.parallel, epoch)
    bundles = bundles_by_node(placement_group, first_bundle, len(places))
    nodes = [node for _, node in bundles]
    is_near = len(set(nodes)) == 1 and "" not in nodes
    is_alone = is_near and nodes[0] == clients_node
    size = config.parallel.tensor_parallel_size
    for i in range(0, len(places), size):
        if (num_nodes := len(set(nodes[i : i + size]))) > 1:
            log.warning("%s: tensor-parallel ranks are on %d nodes", places[i].name, num_nodes)
    actors = [
        RemoteRank.options(
            **_reserved(placement_group.bundle_specs[bundle]),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index=bundle
            ),
        ).remote(
            config,
            place,
            f"{engine_id}/{place.dp_rank}",
            credentials,
            is_on_one_node=is_near,
            is_reached_from_one_node=is_alone,
            first_bundle=first_bundle,
        )
        for (bundle, _), place in zip(bundles, places, strict=True)
    ]
    handles = [RayRank(actor) for actor in actors]
    return RankGroup(config.parallel, handles, watchdog_s=config.watchdog_s, epoch=epoch)


def _reserved(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return Ray's options for a rank that has a bundle of its placement group to itself."""
    num_gpus = bundle.get("GPU", 0)
    options: dict[str, Any] = {"num_cpus": bundle.get("CPU", 0), "num_gpus": num_gpus}
    if variables := environment_of_ranks(num_gpus):
        # Ray adds them to those of the application.
        options["runtime_env"] = {"env_vars": variables}
    return options
