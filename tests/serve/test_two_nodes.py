"""Two nodes, by Ray's own cluster utility on one machine: where ranks are, and that they answer as
one rank does. In a process of its own, since a process belongs to one cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RANK_CPUS = 0.4
SCRIPT = f"""
import json, sys
import ray
from ray.cluster_utils import Cluster
from serve.llm import LLM, SamplingParams

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
ray.init(cluster.address, log_to_driver=False)
PROMPTS = [[65 + i, 66, 67 + i] for i in range(8)]
OPTIONS = dict(dtype="float32", max_num_seqs=4, enforce_eager=True, num_cpus={RANK_CPUS})

def answers(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    return [output.outputs[0].token_ids for output in outputs]

def told(**size):
    llm = LLM(**OPTIONS, **size)
    found = answers(llm)
    report = llm.engine._call(llm.engine._core.group.report())
    nodes = [rank.node for rank in report.ranks]
    threads = ray.get([
        handle.actor.__ray_call__.remote(lambda rank: rank._context.ranks_on_node)
        for handle in llm.engine._core.group.handles
    ])
    llm.engine.close()
    return dict(answers=found, nodes=nodes, ranks_on_node=threads)

print(json.dumps([
    dict(answers=answers(LLM(**OPTIONS))),
    told(tensor_parallel_size=2),
    told(data_parallel_size=2, placement_strategy="STRICT_SPREAD"),
]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.feature("P01", "P02", "R05")
def test_ranks_are_packed_or_spread_over_two_nodes_and_answer_as_one_rank() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    one, packed, spread = found
    assert packed["answers"] == spread["answers"] == one["answers"]
    assert [len(set(each["nodes"])) for each in (packed, spread)] == [1, 2]
    assert [each["ranks_on_node"] for each in (packed, spread)] == [[2, 2], [1, 1]]
