"""An application whose engines draft with the model's own layer answers as one that does not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PROMPTS = ["Count from 3 to 9.", "Sort 5 2 9.", "Monday Tuesday", "12 + 30 is", "a b a b a b"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.feature("S04", "T05", "D04")
def test_two_pools_draft_with_the_model_s_own_layer(
    start_app: Callable[..., Any], mtp_checkpoint: Path
) -> None:
    """Greedy answers and drawn ones, by ten clients at once; prompts go from one pool to the other
    with the drafter's state."""
    from serve.llm import LLM, SamplingParams

    options = (f"model={mtp_checkpoint}", "served_model_name=v3", "dtype=float32", "O=0")
    sizes = ("max_num_seqs=4", "max_model_len=96", "kv_memory=16MiB")
    drafts = ("speculative_config.method=mtp", "speculative_config.num_speculative_tokens=3")
    app = start_app("drafts", *options, *sizes, *drafts)
    plain = LLM(mtp_checkpoint, dtype="float32", max_num_seqs=4, max_model_len=96, O=0)
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}]
    asked = [(prompt, kind) for prompt in PROMPTS for kind in kinds]
    params: list[Any] = [SamplingParams(max_tokens=48, ignore_eos=True, **k) for _, k in asked]
    outputs = plain.generate([prompt for prompt, _ in asked], params)

    with app.client() as client:

        def complete(prompt: str, kind: dict[str, Any]) -> list[int]:
            extra = {"ignore_eos": True, "return_token_ids": True}
            answer = client.completions.create(
                model="v3", prompt=prompt, max_tokens=48, extra_body=extra, **kind
            )
            return list(answer.choices[0].token_ids)

        with ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(complete, *zip(*asked, strict=True)))
    assert found == [output.outputs[0].token_ids for output in outputs]

    def are_told() -> bool:
        tokens, accepted = app.num_drafted("draft_tokens"), app.num_drafted("accepted_tokens")
        return 0 < accepted["decode"] < tokens["decode"]

    app.wait_until(are_told)
