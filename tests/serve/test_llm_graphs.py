"""What graphs cost and what their padding does, seen from the offline API."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from cluster.rank import runner
from compile.errors import FieldError
from serve.llm import LLM, SamplingParams

GRAPHS = {"level": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def llm_with(sizes: list[int] | None, *, is_reserved: bool = False, **options: Any) -> LLM:
    """Return the bundled model that replays whole decode steps of the given sizes; None: none."""
    graphs = {**GRAPHS, "cudagraph_capture_sizes": sizes, "reserve_graph_memory": is_reserved}
    return LLM(
        max_num_seqs=4,
        max_model_len=48,
        dtype="float32",
        compilation_config=graphs if sizes else {"level": 0},
        **options,
    )


@pytest.mark.feature("N06")
def test_padding_of_decode_steps_takes_no_kv_and_makes_no_outputs() -> None:
    """A pool that three sequences fill to the last block still pads them to four."""
    prompts = [[65 + i] * 13 for i in range(3)]  # 13 + 20 tokens: three blocks each
    plain = llm_with(None, num_kv_blocks=9)
    wanted = [output.outputs[0].token_ids for output in plain.generate(prompts, GREEDY)]
    llm = llm_with([4], num_kv_blocks=9)
    found = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in found] == wanted
    # The first token comes from the prompt's step; the pool was full, and nobody had to wait.
    assert {k.num_seqs: n for k, n in llm.runner.forward.num_replays.items()} == {4: 19}
    stats = llm.engine.scheduler.stats()
    assert (stats.num_preemptions, stats.num_free_blocks) == (0, 9)


@pytest.mark.feature("C10")
def test_memory_of_graphs_is_measured_before_kv_is_sized_and_logged_beside_what_they_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lockstep.rank")
    llm = llm_with([1, 2, 4], kv_memory="8MiB", is_reserved=True)
    [line] = [r.getMessage() for r in caplog.records if "reserved" in r.getMessage()]
    reserved, taken = map(int, re.findall(r"\d+", line))
    assert taken == llm.runner.forward.taken_bytes > 0
    assert taken <= reserved < taken + 3 * 2**20  # at most a MiB for each graph beside its tensors
    found = llm.generate([[65] * 5], GREEDY)
    assert found == llm_with(None, kv_memory="8MiB").generate([[65] * 5], GREEDY)
    assert llm.runner.forward.num_replays  # what was captured for trial is not replayed


@pytest.mark.feature("C10")
def test_kv_that_would_leave_no_room_for_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_memory_bytes", lambda: 8 * 2**20)
    llm_with([4], kv_memory="8MiB")
    wanted = r"^kv_memory: wanted at most the 8388608 bytes that are available, \d+ of them for "
    with pytest.raises(FieldError, match=wanted + "graphs, found 8388608"):
        llm_with([4], kv_memory="8MiB", is_reserved=True)
