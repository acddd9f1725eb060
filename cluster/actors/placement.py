"""Where the bundles of placement groups are: which of a group's are on one node, and how many ranks
of an application share one; and which of its node's GPUs an actor has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from cluster.group.device import RankDevice, take_gpu


def bundles_by_node(group: PlacementGroup, first: int, num: int) -> list[tuple[int, str]]:
    """Return the indices of `num` bundles from `first` on, each with its node, those of one node in
    a row, since Ray promises no order; the node is empty if it is not known."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    bundles = range(first, first + num)
    first_on: dict[str, int] = {}
    for bundle in bundles:
        first_on.setdefault(nodes.get(bundle, ""), bundle)
    in_rows = sorted(bundles, key=lambda bundle: (first_on[nodes.get(bundle, "")], bundle))
    return [(bundle, nodes.get(bundle, "")) for bundle in in_rows]


def ranks_beside(node: str, first_bundle: int) -> int:
    """Return how many ranks of its application are placed on this actor's node, itself included.
    Each group has `first_bundle` bundles before those of its ranks."""
    own = ray.util.get_current_placement_group()
    if own is None:
        return 1
    return count_ranks(ray.util.placement_group_table(), own.id.hex(), node, first_bundle)


def count_ranks(
    table: Mapping[str, Mapping[str, Any]], own_id: str, node: str, first_bundle: int
) -> int:
    """Count the ranks on a node in Ray's table of placement groups. An application's groups are
    those whose names begin as this one's: Serve's are `SERVE_REPLICA::application#pool#replica`."""
    application, is_served, _ = str(table[own_id]["name"]).partition("#")
    num = 0
    for group_id, each in table.items():
        is_beside = is_served and str(each["name"]).startswith(f"{application}#")
        if each["state"] != "REMOVED" and (is_beside or group_id == own_id):
            places: dict[int, str] = each["bundles_to_node_id"]
            num += sum(at == node and i >= first_bundle for i, at in places.items())
    return max(1, num)


def num_nodes() -> int:
    """Return how many nodes the cluster has."""
    return sum(bool(each["Alive"]) for each in ray.nodes())


def cores_of_node(node: str) -> int:
    """Return how many cores Ray may use on a node: fewer than there are in a container with a
    limit, or where `ray start` was told so."""
    return max(1, int(_resources(node).get("CPU", 1)))


def own_gpu(node: str) -> RankDevice:
    """Take the GPU of its node that Ray gave this actor; see `take_gpu`."""
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return take_gpu(ids, int(_resources(node).get("GPU", 0)))


def _resources(node: str) -> Mapping[str, float]:
    return next((each["Resources"] for each in ray.nodes() if each["NodeID"] == node), {})
