"""Which GPU a rank has, by what Ray says of it and what its node's operator set before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_ranks import config_of

from cluster.actors import placement, ray_ranks
from cluster.config import EngineConfig
from cluster.group import device
from cluster.group.context import RankContext
from cluster.group.device import NOSET, OVERLAPPING, VISIBLE, RankDevice, take_gpu
from compile.errors import FieldError

A, B, C = "GPU-0af1", "GPU-1b22", "GPU-2c33"
MIG = "MIG-5d44", "MIG-6e55"


class Planted:
    """Ray's runtime context of an actor that has these accelerators."""

    def __init__(self, ids: list[str]) -> None:
        self._ids = ids

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        return {"GPU": self._ids, "TPU": []}


def planted(
    monkeypatch: pytest.MonkeyPatch, ids: list[str], visible: str | None, num_gpus: float
) -> dict[str, str]:
    """Let Ray give this process a node's GPUs; return the environment that it then finds."""
    environment = {} if visible is None else {VISIBLE: visible}
    nodes = [
        {"NodeID": "other", "Resources": {"CPU": 1.0, "GPU": 64.0}},
        {"NodeID": "here", "Resources": {"CPU": 8.0, "GPU": num_gpus}},
    ]
    monkeypatch.setattr(placement.ray, "get_runtime_context", lambda: Planted(ids))
    monkeypatch.setattr(placement.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(take_gpu, "__defaults__", (environment,))
    return environment


@pytest.mark.feature("P19")
@pytest.mark.parametrize(
    ("own", "visible", "num_gpus", "ordered"),
    [
        ("0", None, 4, "0,1,2,3"),
        ("2", None, 4, "2,0,1,3"),
        ("0", None, 1, "0"),
        # Within an operator's list Ray gives back what stands there.
        ("5", "4,5,7", 3, "5,4,7"),
        ("5", " 4, 5 ,7", 3, "5,4,7"),
        ("7", "7", 1, "7"),
        (B, f"{A},{B},{C}", 3, f"{B},{A},{C}"),
        (C, f"{A},{B},{C}", 2, f"{C},{A},{B}"),
        # CUDA shows one of these, and so no other is named.
        (MIG[1], ",".join(MIG), 2, MIG[1]),
    ],
)
def test_a_rank_sees_its_own_gpu_first_and_all_others_behind_it(
    own: str,
    visible: str | None,
    num_gpus: int,
    ordered: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = planted(monkeypatch, [own], visible, num_gpus)
    found = placement.own_gpu("here")
    assert found == RankDevice("cuda:0", own)
    assert torch.device(found.name) == torch.device("cuda", 0)
    assert environment == {VISIBLE: ordered, OVERLAPPING: "1"}


def test_ranks_of_a_node_see_the_same_gpus_and_have_different_ones_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Half a GPU each: Ray gives two ranks the same id.
    seen = []
    for rank in range(8):
        environment = planted(monkeypatch, [str(rank // 2)], None, 4.0)
        assert placement.own_gpu("here").gpu == str(rank // 2)
        seen.append(environment[VISIBLE].split(","))
    assert all(sorted(each) == ["0", "1", "2", "3"] for each in seen)
    assert [each[0] for each in seen] == ["0", "0", "1", "1", "2", "2", "3", "3"]


def test_what_an_operator_says_of_overlapping_devices_stays() -> None:
    environment = {OVERLAPPING: "0"}
    take_gpu(["1"], 2, environment)
    assert environment == {OVERLAPPING: "0", VISIBLE: "1,0"}


@pytest.mark.parametrize(
    ("ids", "visible", "message"),
    [
        ([], None, "num_gpus: wanted one GPU of Ray for each rank, or a part of one, found none"),
        # Ray says so where the list that it started with is empty.
        ([], "", "num_gpus: wanted one GPU of Ray for each rank, or a part of one, found none"),
        # The list of an application's runtime_env, which is shorter than the node's.
        (["2", "3"], "2,3", "num_gpus: wanted one GPU of Ray .*, found 2, 3"),
        ([A], None, f"{VISIBLE}: wanted a list with {A} where Ray is started, .*, found none"),
        ([MIG[0]], None, f"{VISIBLE}: wanted a list with {MIG[0]} where Ray is started"),
        ([A], f"{B},{C}", f"{VISIBLE}: wanted a list with {A}, the GPU that Ray gave, found '{B}"),
        (["0"], "4,5", f"{VISIBLE}: wanted a list with 0, the GPU that Ray gave, found '4,5'"),
    ],
)
def test_an_id_that_names_no_gpu_is_refused_by_name(
    ids: list[str], visible: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = planted(monkeypatch, ids, visible, 4.0)
    before = dict(environment)
    with pytest.raises(FieldError, match=message):
        placement.own_gpu("here")
    assert environment == before


@pytest.mark.feature("P19")
@pytest.mark.parametrize("num_gpus", [0.25, 1.0])
def test_ray_hides_no_gpu_from_ranks_that_have_one(num_gpus: float) -> None:
    from ray._private.accelerators.nvidia_gpu import NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR

    assert NOSET == NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR
    found = ray_ranks._reserved({"CPU": 1.0, "GPU": num_gpus})
    environment = {"env_vars": {NOSET: "1"}}
    assert found == {"num_cpus": 1.0, "num_gpus": num_gpus, "runtime_env": environment}


def test_ranks_on_a_cpu_have_huge_pages_unless_the_user_tunes_glibc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    environment = {"env_vars": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}
    options = {"num_cpus": 2.0, "num_gpus": 0}
    assert ray_ranks._reserved({"CPU": 2.0}) == options | {"runtime_env": environment}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert ray_ranks._reserved({"CPU": 2.0}) == options


def config_on(kind: str) -> EngineConfig:
    return replace(config_of(Path()), device=kind)


def test_a_rank_knows_its_device_by_its_index_and_its_gpu_by_its_nodes_name() -> None:
    assert RankContext(config_on("cpu")).device == RankDevice("cpu")
    assert RankContext(config_on("cuda"), gpu="6").device == RankDevice("cuda:0", "6")
    # One that Ray did not start has what `CUDA_VISIBLE_DEVICES` shows first.
    assert RankContext(config_on("cuda")).device == RankDevice(device.OWN_GPU)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_actor_takes_its_gpu_before_torch_is_loaded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.actors import rank_actor
    from cluster.group.context import RankPlace
    from cluster.wire.credentials import Credentials

    environment = planted(monkeypatch, ["3"], None, 4.0)
    context: Any = Planted(["3"])
    context.get_node_id = lambda: "here"
    monkeypatch.setattr(placement.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(rank_actor, "ranks_beside", lambda node, first: 1)
    monkeypatch.setattr(rank_actor, "configure_logs", lambda log_format: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    actor = rank_actor.RankActor(
        config_on(kind),
        RankPlace(0, 1, 2),
        "e/0",
        Credentials("test", b"s" * 32),
        is_on_one_node=True,
        is_reached_from_one_node=True,
        first_bundle=0,
    )
    said = actor.debug()
    if kind == "cuda":
        assert (said["device"], said["gpu"]) == ("cuda:0", "3")
        assert environment[VISIBLE] == "3,0,1,2"
    else:
        assert (said["device"], said["gpu"], environment) == ("cpu", "", {})
