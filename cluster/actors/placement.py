"""Placement groups for rank groups: one bundle per rank.

A group's owner may have a bundle of its own before the ranks' (a Serve replica does), so that owner
and ranks are placed together.
"""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from cluster.config import DEFAULT_NUM_CPUS, PLACEMENT_TIMEOUT_S, EngineConfig, rank_bundles


class PlacementError(RuntimeError):
    """A placement group did not become ready in time."""


def create_placement_group(
    config: EngineConfig,
    *,
    num_cpus: float = DEFAULT_NUM_CPUS,
    timeout_s: float = PLACEMENT_TIMEOUT_S,
) -> PlacementGroup:
    """Create a placement group for a rank group and wait until it is placed.

    Raises:
        PlacementError: not placed in time; tells what was asked for and what is free.
    """
    bundles = rank_bundles(config, num_cpus)
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        free = free_resources()
        ray.util.remove_placement_group(group)
        raise PlacementError(
            f"placement group: wanted {bundles} within {timeout_s:g} s, found free {free}"
        )
    return group


def free_resources() -> dict[str, float]:
    """Return the CPUs and GPUs of the cluster that are not reserved."""
    return {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}


def bundles_by_node(group: PlacementGroup, first: int, num: int) -> tuple[list[int], bool]:
    """Return the indices of `num` bundles from `first` on, those of one node in a row.

    Ray promises no order. Ranks take bundles as they come here, so that a tensor-parallel group
    lies on as few nodes as the placement allows. Also returned is whether they are known to lie on
    one.
    """
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    bundles = range(first, first + num)
    first_on: dict[str, int] = {}
    for bundle in bundles:
        first_on.setdefault(nodes.get(bundle, ""), bundle)
    in_rows = sorted(bundles, key=lambda bundle: (first_on[nodes.get(bundle, "")], bundle))
    return in_rows, len(first_on) == 1 and "" not in first_on
