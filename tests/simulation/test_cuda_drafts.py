"""Drafts of a model's own layer on the simulated CUDA device: what a GPU that runs behind its host
drafts, and what the host waits for meanwhile."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_device import EVENT_WAITS, Order
from cuda_torch import simulated
from cuda_work import FAMILIES, SHAPE, SIZES, TINY, trace
from mtp import save_with_mtp

from serve.llm import LLM

ORDERS: list[tuple[Order, int]] = [("late", 0), ("eager", 1), ("random", 2)]
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = transformers.DeepseekV3Config(
        **SHAPE | FAMILIES["DeepseekV3"] | {"num_hidden_layers": 3, "initializer_range": 0.3}
    )
    save_with_mtp(path, transformers.DeepseekV3ForCausalLM(config), noise=0.05, volume=0.1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path)
    return path


class Drafting:
    """An engine that drafts, with what it drafted."""

    def __init__(self, model: Path, device: str, mode: str) -> None:
        compilation: dict[str, Any] = {"level": 0, "cudagraph_mode": mode}
        if mode != "NONE":
            compilation["cudagraph_capture_sizes"] = (1, 2, 4)
        drafts = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
        options = SIZES | {"compilation": compilation, "speculative_config": drafts}
        self.llm = LLM(model, device=device, **options)
        self.drafts: list[list[list[int]]] = []
        wait = self.llm.runner.wait

        def recorded(launched: Any) -> Any:
            sampled = wait(launched)
            self.drafts.append(sampled.drafts)
            return sampled

        self.llm.runner.wait = recorded  # type: ignore[method-assign]

    def generate(self, seed: int) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Return what a trace's requests got, and what was drafted for them in each step."""
        self.drafts.clear()
        requests = trace(seed)
        outputs = self.llm.generate(
            [request.prompt for request in requests], [request.params for request in requests]
        )
        return [output.outputs[0].token_ids for output in outputs], list(self.drafts)


@pytest.mark.feature("S04", "T05", "D04", "C07", "X04")
@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_drafts_are_those_of_the_cpu_and_a_step_waits_once(model: Path, mode: str) -> None:
    on_cpu = Drafting(model, "cpu", "NONE")
    wanted = [on_cpu.generate(seed) for _, seed in ORDERS]
    assert any(any(drafts) for _, drafts in wanted)
    with simulated(*ORDERS[0]) as device:
        serving = Drafting(model, "cuda", mode)
        for order, each in zip(ORDERS, wanted, strict=True):
            device.reorder(*order)
            before = Counter(device.counts)
            assert serving.generate(order[1]) == each
            counts = Counter(device.counts) - before
            found = {k: n for k, n in counts.items() if re.search("wait|hidden|pageable", k)}
            assert found == {EVENT_WAITS: len(each[1])}
        mtp = serving.llm.runner.forward.mtp
        assert mtp is not None
        assert all(any(times.values()) for times in mtp.num_replays) == (mode != "NONE")
        serving.llm.runner.close()
