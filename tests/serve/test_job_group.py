"""`LLM` with several ranks: actors that answer as one rank in this process does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integers import rounded_model

from serve.llm import LLM, SamplingParams, StructuredOutputsParams
from serve.pools import job_group

pytestmark = [pytest.mark.ray, pytest.mark.slow]

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "enforce_eager": True}
PROMPTS = [[65 + i, 66, 67 + i] for i in range(12)]
"""More than run at once."""
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=40, logprobs=1),
    SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-d]{4}"), max_tokens=20
    ),
]


@pytest.fixture
def start(ray_cluster: Any) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**size: Any) -> LLM:
        made.append(LLM(**OPTIONS, **size))
        return made[-1]

    yield make
    for llm in made:
        llm.engine.close()  # type: ignore[attr-defined]


def answers(llm: LLM) -> list[Any]:
    """Return tokens and ends of the answers to all prompts."""
    outputs = llm.generate(PROMPTS, PARAMS * 4)
    return [
        (choice.token_ids, choice.text, choice.finish_reason, len(choice.logprobs))
        for output in outputs
        for choice in output.outputs
    ]


@pytest.mark.feature("P01", "P02", "R05")
def test_several_ranks_answer_as_one_does(start: Callable[..., LLM]) -> None:
    """Each kind of group alone: `test_two_nodes.py`."""
    llm = start(tensor_parallel_size=2, data_parallel_size=2)
    group: Any = llm.engine
    assert len(group._core.group.handles) == 4
    # All is on this node.
    assert all(inbox.startswith("tcp://127.0.0.1:") for inbox in group._core.group.inboxes)
    wanted = answers(LLM(**OPTIONS))
    assert answers(llm) == wanted


@pytest.mark.feature("S08", "R05")
@pytest.mark.parametrize("held", ["int8", "int4"])
def test_ranks_that_hold_integers_answer_as_a_model_of_them(
    held: str, start: Callable[..., LLM], tiny_checkpoint: Path
) -> None:
    llm = start(tensor_parallel_size=2, quantization=held)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:4], params)]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    model = rounded_model(plain, held, 2)
    for prompt, tokens in zip(PROMPTS[:4], outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.feature("R05")
def test_ranks_that_ray_cannot_place_end_the_start(
    start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_group, "PLACEMENT_TIMEOUT_S", 2.0)
    wanted = r"^ranks: wanted .*CPU.* by STRICT_PACK in 2 s, found free .*CPU"
    with pytest.raises(job_group.NotPlaced, match=wanted):
        start(tensor_parallel_size=2, label_selector={"zone": "nowhere"})


@pytest.mark.feature("P14", "R05")
def test_a_batch_goes_on_when_a_rank_is_killed(start: Callable[..., LLM]) -> None:
    llm = start(tensor_parallel_size=2)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=600)
    wanted = LLM(**OPTIONS).generate(PROMPTS[:4], params)
    group: Any = llm.engine
    seen: list[str] = []
    step = group.step

    def step_and_kill() -> list[Any]:
        outputs = step()
        if not seen:
            seen.append("killed")
            ranks = group._call(group._core.group.report()).ranks
            os.kill(ranks[1].pid, signal.SIGKILL)
        return outputs

    group.step = step_and_kill
    found = llm.generate(PROMPTS[:4], params)
    assert [each.outputs[0].token_ids for each in found] == [
        each.outputs[0].token_ids for each in wanted
    ]
    assert group._core.group.epoch >= 1
