"""Every YAML file among the examples is what Ray, KubeRay and `deploy` take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve.config import DeployConfig, deploy_config

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
ARGUMENTS = "bundled.yaml"
"""The one file of arguments alone."""
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}


def read(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text())


def resolved(served: dict[str, Any], folder: Path) -> DeployConfig:
    """Return what a Serve YAML deploys, with a checkpoint that is there in place of its own."""
    [application] = ServeDeploySchema.model_validate(served).applications
    assert application.import_path == "serve.app:deploy"
    args = dict(application.args)
    if "model" in args:
        (folder / "config.json").write_text(json.dumps(LARGE))
        args["model"] = str(folder)
    return deploy_config(args)


@pytest.mark.feature("R02")
@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_a_file_is_what_it_is_for(name: str, tmp_path: Path) -> None:
    found = read(name)
    if name == ARGUMENTS:
        deploy_config({"config": str(CONFIGS / name)})
        return
    if name == "kuberay.yaml":
        assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    resolved(found, tmp_path)


@pytest.mark.feature("R02")
def test_nodes_of_eight_gpus_are_filled(tmp_path: Path) -> None:
    """With groups that fit into a node each, and share one GPU with nobody."""
    for name in ("eight_gpus.yaml", "kuberay.yaml"):
        found = read(name)
        if name == "kuberay.yaml":
            [workers] = found["spec"]["rayClusterConfig"]["workerGroupSpecs"]
            [container] = workers["template"]["spec"]["containers"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
            found = yaml.safe_load(found["spec"]["serveConfigV2"])
        pools = resolved(found, tmp_path).pools
        gpus = [
            [bundle["GPU"] for bundle in pool.placement.bundles(pool.engine.parallel)]
            * pool.replicas
            for pool in pools
        ]
        assert sum(map(sum, gpus)) == 8
        assert {pool.placement.strategy for pool in pools} == {"STRICT_PACK"}


@pytest.mark.feature("R02")
def test_two_nodes_have_a_pool_each(tmp_path: Path) -> None:
    pools = resolved(read("two_nodes.yaml"), tmp_path).pools
    assert [pool.placement.label_selector["pool"] for pool in pools] == ["prefill", "decode"]
    assert [pool.engine.scheduler.max_num_seqs for pool in pools] == [16, 64]
