"""Adapters come and go while ranks serve (S10): tokens are those of merged weights."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from local_ranks import CREDENTIALS, Ingress, RunningLeader, config_of, wait_for
from safetensors.torch import load_file, save_file
from wire_structs import request_of

from cluster.config import EngineConfig, LoraModule, Role
from cluster.group.context import LoadedAdapters, RankContext, RankPlace
from cluster.group.rendezvous import LeaderEndpoints, introduce
from cluster.rank import leader as leader_module
from cluster.rank.follower import Follower
from cluster.rank.leader import Leader
from cluster.wire.messages import FIRST_LOADED_ID, EngineOutput, LoraAdapter, Submit, encode
from model.adapters import WEIGHTS_FILE
from model.config import fingerprint

LIMIT_S = 300.0
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def adapted(make_oracle: Callable[[str], Any]) -> Any:
    """A checkpoint with two adapters: of all layers, and of some."""
    oracle = make_oracle("one kv head")
    oracle.write_adapters()
    return oracle


@pytest.fixture(autouse=True)
def _sleeps_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks around in time who was not woken."""
    monkeypatch.setattr(leader_module, "MAX_SLEEP_MS", 1000 * LIMIT_S)


def adapter_of(path: Path, number: int) -> LoraAdapter:
    return LoraAdapter(FIRST_LOADED_ID + number, path.name, str(path), fingerprint(path))


def config_with_slots(oracle: Any, num_slots: int, num_static: int = 0, **fields: Any) -> Any:
    static = tuple(LoraModule(path.name, str(path)) for path in oracle.adapters[:num_static])
    config = config_of(oracle.path, 200, **{"num_kv_blocks": 200, **fields})
    return replace(config, lora_modules=static, max_loras=num_slots, max_lora_rank=9)


class Asked:
    """Requests to leaders, and what came of them; `adapter` is the oracle's."""

    def __init__(self, oracle: Any, ingress: Ingress) -> None:
        self._oracle, self._ingress = oracle, ingress
        self._outputs: dict[str, list[EngineOutput]] = {}

    def ask(self, send: Callable[[bytes], None], lora: int, num_tokens: int = 12) -> str:
        name = str(len(self._outputs))
        self._outputs[name] = []
        request = request_of(name, PROMPT, max_tokens=num_tokens)
        send(encode(Submit(msgspec.structs.replace(request, adapter_id=lora), None)))
        return name

    def wait_for(self, name: str, num_tokens: int = 0) -> list[EngineOutput]:
        """Wait for so many tokens of a request, or for its end."""

        def has_come() -> bool:
            for output in self._ingress.receive(0.1):
                self._outputs[output.request_id].append(output)
            mine = self._outputs[name]
            num_there = sum(len(output.token_ids) for output in mine)
            is_over = any(output.finish_reason for output in mine)
            return is_over or 0 < num_tokens <= num_there

        wait_for(has_come, LIMIT_S)
        return self._outputs[name]

    def check(self, name: str, adapter: int) -> None:
        """The request ends with the tokens of the model with this adapter merged."""
        outputs = self.wait_for(name)
        assert outputs[-1].finish_reason == "length", outputs[-1]
        tokens = [token for output in outputs for token in output.token_ids]
        self._oracle.check_greedy(PROMPT, tokens, adapter)
        others = {0, 1, 2} - {adapter}
        for other in others:  # else the check would say nothing
            logits = self._oracle.logits(PROMPT, tokens, other)
            assert logits.argmax(-1).tolist() != tokens

    def is_over(self, name: str) -> bool:
        return any(output.finish_reason for output in self._outputs[name])


def loaded_by(leader: Leader, wanted: set[int]) -> LoadedAdapters:
    wait_for(lambda: leader.stats().adapters.ids == wanted, LIMIT_S)
    return leader.stats().adapters


def error_of(leader: Leader, adapter: LoraAdapter) -> str:
    """Wait until a leader says why it has not an adapter."""
    return wait_for(lambda: leader.stats().adapters.errors.get(adapter.id), LIMIT_S)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[EngineConfig], RunningLeader]]:
    running: list[RunningLeader] = []

    def start(config: EngineConfig) -> RunningLeader:
        running.append(RunningLeader(config))
        return running[-1]

    yield start
    for each in running:
        each.close()


GRAPHS = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": (1, 2, 4), "sealed": "strict"}


@pytest.mark.feature("S10")
@pytest.mark.parametrize("kind", ["replayed", "overlapped"])
def test_adapters_take_turns_in_a_slot_while_others_are_served(
    adapted: Any, start: Callable[..., RunningLeader], caplog: Any, kind: str
) -> None:
    """A slot is free for the next one when the last sequence that has it has ended."""
    graphs = GRAPHS if kind == "replayed" else {}
    config = config_with_slots(adapted, 2, 1, **graphs)
    running = start(replace(config, overlap=kind == "overlapped"))
    leader, asked = running.leader, Asked(adapted, running.ingress)
    first, second = (adapter_of(path, i) for i, path in enumerate(adapted.adapters))
    plain = asked.ask(running.send, 0, 150)
    static = asked.ask(running.send, 1, 40)
    asked.wait_for(plain, 1)
    with caplog.at_level(logging.INFO, "lockstep.adapters"):
        leader.set_adapters([first])
        assert not loaded_by(leader, {first.id}).errors
        kept = asked.ask(running.send, first.id, 190)
        asked.wait_for(kept, 2)
        leader.set_adapters([second])
        other = asked.ask(running.send, 1)
        asked.check(other, 1)
        if not asked.is_over(kept):
            assert leader.stats().adapters.ids == {first.id}, "a sequence has it"
        asked.check(kept, 1)
        loaded_by(leader, {second.id})
    reused = asked.ask(running.send, second.id)
    gone = asked.ask(running.send, first.id)
    asked.check(reused, 2)
    asked.check(plain, 0)
    asked.check(static, 1)
    [refusal] = asked.wait_for(gone)
    wanted = "adapter_id: wanted the id of an adapter that is loaded here"
    assert refusal.error == f"{wanted}, found {first.id}"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"adapter plain ({first.id}): loaded",
        f"adapter plain ({first.id}): unloaded",
        f"adapter stable ({second.id}): loaded",
    ]


@pytest.mark.feature("S10")
def test_what_cannot_be_read_is_told_and_another_try_is_one_that_is_asked_for(
    adapted: Any, start: Callable[..., RunningLeader], tmp_path: Path
) -> None:
    running = start(replace(config_with_slots(adapted, 1), max_lora_rank=8))
    leader, asked = running.leader, Asked(adapted, running.ingress)
    shutil.copytree(adapted.adapters[0], tmp_path / "a")
    plain = adapter_of(tmp_path / "a", 0)
    wide = adapter_of(adapted.adapters[1], 1)
    changed = msgspec.structs.replace(plain, id=plain.id + 2, fingerprint=b"of others")
    missing = msgspec.structs.replace(plain, id=plain.id + 3, path=str(tmp_path / "none"))
    leader.set_adapters([wide, changed, missing])
    for adapter, error in (
        (wide, "tp=0: module model.layers.1.self_attn.o_proj: wanted a rank of at most 8 "),
        (changed, "tp=0: a: wanted the files that it was loaded from first, found others in "),
        (missing, "tp=0: adapter_config.json: wanted a readable file, found "),
    ):
        assert error_of(leader, adapter).startswith(error)
    refused = asked.ask(running.send, changed.id)
    assert asked.wait_for(refused)[0].error.startswith(
        "adapter_id: wanted the id of an adapter that is"
    )
    mended = msgspec.structs.replace(changed, fingerprint=plain.fingerprint)
    leader.set_adapters([mended, plain])
    loaded_by(leader, {plain.id})
    assert leader.stats().adapters.errors.keys() == {mended.id}, "it was wanted all the time"
    leader.set_adapters([])
    assert loaded_by(leader, set()) == LoadedAdapters()
    leader.set_adapters([mended])
    assert loaded_by(leader, {mended.id}) == LoadedAdapters(frozenset({mended.id}))
    asked.check(asked.ask(running.send, mended.id), 1)


@pytest.mark.slow
@pytest.mark.feature("S10", "X06")
def test_what_is_compiled_while_a_rank_serves_has_room_for_adapters(
    adapted: Any, start: Callable[..., RunningLeader], tmp_path: Path
) -> None:
    """Tokens are the same before and after a rank goes over to it."""
    compilation: dict[str, Any] = {
        "level": 3,
        "use_inductor": False,
        "serve_while_compiling": "on",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": (1, 2),
        "capture_num_tokens": (8,),
        "cache_dir": str(tmp_path),
        "sealed": "strict",
    }
    running = start(config_with_slots(adapted, 1, max_num_seqs=2, **compilation))
    leader, asked = running.leader, Asked(adapted, running.ingress)
    for number, path in enumerate(adapted.adapters, start=1):
        adapter = adapter_of(path, number)
        leader.set_adapters([adapter])
        loaded_by(leader, {adapter.id})
        asked.check(asked.ask(running.send, adapter.id), number)
        wait_for(lambda: leader.runner.compile_progress is None, LIMIT_S)
        assert leader.runner.switch.is_over and not leader.runner.compile_error
        asked.check(asked.ask(running.send, adapter.id), number)
    assert sum(leader.runner.forward.num_replays.values()) > 0


def test_an_engine_without_room_loads_none(
    adapted: Any, start: Callable[..., RunningLeader]
) -> None:
    running = start(config_with_slots(adapted, 0, 1))
    asked = Asked(adapted, running.ingress)
    running.leader.set_adapters([adapter_of(adapted.adapters[1], 1)])
    asked.check(asked.ask(running.send, 1), 1)
    assert running.leader.stats().adapters == LoadedAdapters()


class Group:
    """Ranks of one group, each on a thread of this process."""

    def __init__(self, config: EngineConfig) -> None:
        tp, dp = config.parallel.tensor_parallel_size, config.parallel.data_parallel_size
        contexts = [
            RankContext(config, RankPlace(i, 0), credentials=CREDENTIALS) for i in range(dp)
        ]
        opened = [LeaderEndpoints(context) for context in contexts]
        told = introduce([each.rendezvous for each in opened if each.rendezvous is not None])

        def load(index: int) -> Leader | Follower:
            dp_rank, tp_rank = divmod(index, tp)
            if tp_rank:
                place = RankPlace(dp_rank, tp_rank)
                return Follower(replace(contexts[dp_rank], place=place), told[dp_rank])
            return Leader(contexts[dp_rank], opened[dp_rank], told[dp_rank])

        with ThreadPoolExecutor(tp * dp) as threads:
            self.ranks = list(threads.map(load, range(tp * dp)))
        self.leaders = [rank for rank in self.ranks if isinstance(rank, Leader)]
        self.ingress = Ingress()
        self.sends = [self.ingress.inbox(leader.inbox) for leader in self.leaders]
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in self.ranks
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: Leader | Follower) -> None:
        try:
            rank.run()
        except BaseException as error:
            self.errors.append(error)

    def close(self) -> None:
        for leader in self.leaders:
            leader.stop()
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive() and not self.errors
        self.ingress.close()


@pytest.fixture
def start_group() -> Iterator[Callable[[EngineConfig], Group]]:
    groups: list[Group] = []

    def start(config: EngineConfig) -> Group:
        groups.append(Group(config))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def unlike_on_the_last_rank(path: Path, spoilt: Path) -> None:
    """Copy an adapter, with a number that only the last rank of a row-parallel layer reads."""
    shutil.copytree(path, spoilt)
    tensors = load_file(spoilt / WEIGHTS_FILE)
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    tensors[name][0, -1] = torch.inf
    save_file(tensors, spoilt / WEIGHTS_FILE)


@pytest.mark.feature("S10")
def test_every_rank_of_a_group_reads_its_part_or_none_has_it(
    adapted: Any, start_group: Callable[..., Group], tmp_path: Path
) -> None:
    group = start_group(config_with_slots(adapted, 1, parallel=(2,)))
    [leader], asked = group.leaders, Asked(adapted, group.ingress)
    unlike_on_the_last_rank(adapted.adapters[0], tmp_path / "spoilt")
    spoilt = adapter_of(tmp_path / "spoilt", 0)
    leader.set_adapters([spoilt])
    error = error_of(leader, spoilt)
    assert error.startswith("tp=1: tensor base_model.model.model.layers.1.self_attn.o_proj.lora_A.")
    assert "finite numbers that float32 holds" in error and not leader.stats().adapters.ids
    served = asked.ask(group.sends[0], 0, 60)
    asked.wait_for(served, 1)
    first, second = (adapter_of(path, i) for i, path in enumerate(adapted.adapters, start=1))
    for number, adapter in ((1, first), (2, second)):
        leader.set_adapters([adapter])
        loaded_by(leader, {adapter.id})
        asked.check(asked.ask(group.sends[0], adapter.id), number)
    asked.check(served, 0)
    assert not any(rank.stats().adapters.ids for rank in group.ranks if rank is not leader)


@pytest.mark.feature("S10")
def test_leaders_that_step_together_need_not_have_the_same(
    adapted: Any, start_group: Callable[..., Group]
) -> None:
    group = start_group(config_with_slots(adapted, 1, parallel=(1, 2), **GRAPHS))
    asked = Asked(adapted, group.ingress)
    first, second = (adapter_of(path, i) for i, path in enumerate(adapted.adapters))
    group.leaders[0].set_adapters([first])
    loaded_by(group.leaders[0], {first.id})
    served = asked.ask(group.sends[0], first.id, 190)
    asked.wait_for(served, 1)
    group.leaders[1].set_adapters([second])
    loaded_by(group.leaders[1], {second.id})
    asked.check(asked.ask(group.sends[1], second.id, 40), 2)
    asked.check(served, 1)
    assert not group.errors


@pytest.mark.feature("S10")
def test_a_sequence_finds_its_adapter_in_another_slot_of_the_engine_that_goes_on(
    adapted: Any, start: Callable[..., RunningLeader]
) -> None:
    """KV of the prompt is computed here and read there."""
    config = config_with_slots(adapted, 2)
    prefill, decode = (start(replace(config, role=role)) for role in (Role.PREFILL, Role.DECODE))
    first, second = (adapter_of(path, i) for i, path in enumerate(adapted.adapters))
    prefill.leader.set_adapters([first, second])
    decode.leader.set_adapters([second])
    loaded_by(prefill.leader, {first.id, second.id})
    loaded_by(decode.leader, {second.id})
    request = msgspec.structs.replace(request_of("r", PROMPT, max_tokens=20), adapter_id=second.id)
    prefill.send(encode(Submit(request, None)))
    [begun] = wait_for(lambda: prefill.ingress.receive(0.1), LIMIT_S)
    assert begun.handoff is not None and len(begun.token_ids) == 1
    going_on = msgspec.structs.replace(request, output_token_ids=begun.token_ids)
    decode.send(encode(Submit(going_on, begun.handoff)))
    tokens, outputs = list(begun.token_ids), list[EngineOutput]()
    while not (outputs and outputs[-1].finish_reason):
        outputs += wait_for(lambda: decode.ingress.receive(0.1), LIMIT_S)
    tokens += [token for output in outputs for token in output.token_ids]
    assert outputs[-1].finish_reason == "length" and len(tokens) == 20
    assert decode.leader.counts()["prompt_tokens_computed_total",] == 0
    adapted.check_greedy(PROMPT, tokens, 2)
