"""Whatever a sequence is sampled with, interrupting it changes none of its tokens.

Interrupted means: among others in one batch, pre-empted, resumed on another engine with its
output so far, handed from a prefill to a decode engine, or moved to one that takes its place.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch
from local_ranks import REPLICA, RunningLeader, config_of, make_engine, run, tokens_of
from msgspec.structs import replace as changed
from routed import routing
from wire_structs import rules_of, sampling_of

from cluster.actors.reports import LeaderReport
from cluster.config import EngineConfig, Role
from cluster.engine.engine import Engine
from cluster.wire.credentials import Hashes
from cluster.wire.messages import EngineOutput, GenerateRequest, LogitRules, Sampling
from serve.pools.router import Router

VOCAB = 256
NUM_TOKENS = 48
STOPS, OTHER_STOPS = tuple(range(0, VOCAB, 4)), tuple(range(3, VOCAB, 9))

NO_RULES = rules_of()
PLAIN = sampling_of(max_tokens=NUM_TOKENS)


def drawn(**fields: Any) -> Sampling:
    return changed(PLAIN, temperature=1.3, seed=77, **fields)


def ruled(base: Sampling = PLAIN, **fields: Any) -> Sampling:
    return changed(base, rules=changed(NO_RULES, **fields))


# Makes greedy output repeat two tokens, so that a frequency penalty has something to count.
BIAS: dict[str, Any] = {"bias_token_ids": (3, 4, 5), "biases": (9.0, 10.0, -100.0)}

CASES: dict[str, Sampling] = {
    "greedy": PLAIN,
    "temperature": drawn(),
    "seed": changed(drawn(), seed=2**64 - 1),
    "top_k": drawn(top_k=5),
    "top_p": drawn(top_p=0.6),
    "min_p": drawn(min_p=0.2),
    "presence_penalty": ruled(presence_penalty=2.0),
    "frequency_penalty": ruled(frequency_penalty=1.5, **BIAS),
    "repetition_penalty": ruled(repetition_penalty=1.5),
    "logit_bias": ruled(**BIAS),
    "allowed_token_ids": ruled(drawn(), allowed_tokens=(2**60 - 2**40).to_bytes(8, "little")),
    "min_tokens": changed(ruled(drawn(), min_tokens=30), stop_token_ids=STOPS),
    "logprobs": drawn(num_logprobs=3),
    "all": changed(
        drawn(top_k=60, top_p=0.95, min_p=0.01, num_logprobs=2, stop_token_ids=OTHER_STOPS),
        rules=LogitRules(0.4, 0.3, 1.2, (9, 10), (4.0, 3.0), b"\xff" * 25, 12),
    ),
}


def config_for(oracle: Any, **fields: Any) -> EngineConfig:
    sizes: dict[str, int] = {"num_kv_blocks": 900, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return config_of(oracle.path, 256, **sizes | fields)


def engine_for(oracle: Any, **fields: Any) -> Engine:
    return make_engine(config_for(oracle, **fields))


def request_for(name: str, prompt: list[int], output: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest(name, prompt, output or [], CASES[name], b"")


def prompts_for(seed: int) -> dict[str, list[int]]:
    """Prompts repeat a few tokens, so that penalties on them matter."""
    rng = random.Random(seed)
    few = [rng.randrange(VOCAB) for _ in range(25)]
    return {name: [rng.choice(few) for _ in range(rng.randint(20, 90))] for name in CASES}


PROMPTS = prompts_for(31)


@pytest.fixture(scope="module")
def wanted(oracle: Any) -> dict[str, list[EngineOutput]]:
    """Each case alone and from the beginning to the end."""
    engine = engine_for(oracle)
    return {name: run(engine, [request_for(name, PROMPTS[name])])[name] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_an_effect(oracle: Any, wanted: dict[str, Any], name: str) -> None:
    """Otherwise the tests below would show nothing."""
    bases = {"greedy": "temperature", "temperature": "greedy", "frequency_penalty": "logit_bias"}
    base = bases.get(name)
    sampling = CASES[base] if base else drawn()
    if CASES[name].temperature == 0 and not base:
        sampling = PLAIN
    sampling = changed(sampling, stop_token_ids=CASES[name].stop_token_ids)
    asked = GenerateRequest("0", PROMPTS[name], [], sampling, b"")
    plain = run(engine_for(oracle), [asked])["0"]
    if name == "logprobs":
        assert tokens_of(plain) == tokens_of(wanted[name])
        assert [len(output.logprobs) for output in wanted[name]] == [1] * NUM_TOKENS
    else:
        assert tokens_of(plain) != tokens_of(wanted[name])


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "greedy"]
)
def test_greedy_tokens_are_the_best_of_transformers_logits(
    oracle: Any, wanted: dict[str, Any], name: str
) -> None:
    prompt, output = PROMPTS[name], tokens_of(wanted[name])
    rules = CASES[name].rules or NO_RULES
    logits = oracle.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    for position, token in enumerate(output):
        scores = logits[position].clone()
        for biased, bias in zip(rules.bias_token_ids, rules.biases, strict=True):
            scores[biased] += bias
        for seen in {*prompt, *output[:position]}:
            factor = rules.repetition_penalty
            scores[seen] = scores[seen] / factor if scores[seen] > 0 else scores[seen] * factor
        for seen in set(output[:position]):
            count = output[:position].count(seen)
            scores[seen] -= rules.presence_penalty + rules.frequency_penalty * count
        assert float(scores.max() - scores[token]) < 1e-4, f"output {position}"


def test_allowed_tokens_and_min_tokens_hold(wanted: dict[str, Any]) -> None:
    assert set(tokens_of(wanted["allowed_token_ids"])) <= set(range(40, 60))
    assert set(tokens_of(wanted["all"])) <= set(range(200))
    for name, least in (("min_tokens", 30), ("all", 12)):
        output = tokens_of(wanted[name])
        stops = CASES[name].stop_token_ids
        assert not set(output[:least]) & set(stops)
        assert len(output) > least and output[-1] in stops


def test_rows_forget_the_rules_of_their_last_sequence(oracle: Any, wanted: dict[str, Any]) -> None:
    """One row for everybody, three times over: each case follows many others."""
    engine = engine_for(oracle, max_num_seqs=1)
    for names in (list(CASES), list(reversed(CASES)), sorted(CASES)):
        results = run(engine, [request_for(name, PROMPTS[name]) for name in names])
        for name, outputs in results.items():
            assert tokens_of(outputs) == tokens_of(wanted[name]), name


@pytest.mark.parametrize("name", CASES)
def test_pre_emption_changes_nothing(oracle: Any, wanted: dict[str, Any], name: str) -> None:
    """Copies of one sequence in a pool for little more than one of the longest."""
    engine = engine_for(oracle, num_kv_blocks=66)
    request = request_for(name, PROMPTS[name])
    fillers = [GenerateRequest(f"filler {i}", PROMPTS[name][i:], [], PLAIN, b"") for i in range(4)]
    results = run(engine, [*fillers, request])
    assert tokens_of(results[name]) == tokens_of(wanted[name])
    assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("num_delivered", [1, 5, 40])
@pytest.mark.parametrize("name", CASES)
def test_resuming_on_another_engine_changes_nothing(
    oracle: Any, wanted: dict[str, Any], name: str, num_delivered: int
) -> None:
    output = tokens_of(wanted[name])
    num_delivered = min(num_delivered, len(output) - 1)
    engine = engine_for(oracle)
    # Twice: the second time most of it is found in the prefix cache.
    for _ in range(2):
        request = request_for(name, PROMPTS[name], output[:num_delivered])
        found = run(engine, [request])[name]
        assert tokens_of(found) == output[num_delivered:]
        _check_logprobs(found, wanted[name][num_delivered:])
    assert engine.scheduler.stats().prefix_hits > 0


def _check_logprobs(found: list[EngineOutput], wanted: list[EngineOutput]) -> None:
    """Compare token by token: outputs that waited for their reader come as one."""
    ours, theirs = ([each for output in o for each in output.logprobs] for o in (found, wanted))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.rank, mine.top_token_ids) == (other.rank, other.top_token_ids)
        assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def route(
    leaders: dict[str, RunningLeader], requests: list[GenerateRequest]
) -> list[list[EngineOutput]]:
    async def one(router: Router, request: GenerateRequest) -> list[EngineOutput]:
        async with aclosing(router.generate(request)) as outputs:
            return [output async for output in outputs]

    async def all_of_them() -> list[list[EngineOutput]]:
        inboxes = {pool: [running.leader.inbox] for pool, running in leaders.items()}
        async with routing(inboxes) as router:
            return await asyncio.gather(*(one(router, request) for request in requests))

    return asyncio.run(all_of_them())


def test_two_pools_change_nothing(oracle: Any, wanted: dict[str, Any]) -> None:
    requests = [request_for(name, PROMPTS[name]) for name in CASES]
    asks = changed(PLAIN, num_prompt_logprobs=2)
    requests.append(GenerateRequest("prompt", PROMPTS["greedy"], [], asks, b""))
    pools = {role.value: RunningLeader(config_for(oracle, role=role)) for role in Role}
    mixed = pools.pop("mixed")
    try:
        two, one = route(pools, requests), route({"mixed": mixed}, requests)
    finally:
        for pool in (*pools.values(), mixed):
            pool.close()
    for name, ours, theirs in zip(CASES, two, one, strict=False):
        assert tokens_of(ours) == tokens_of(theirs) == tokens_of(wanted[name]), name
        _check_logprobs(ours, wanted[name])
    # They come from the prefill engine, once.
    for results in (two, one):
        given = [output.prompt_logprobs for output in results[-1]]
        assert len(given[0]) == len(PROMPTS["greedy"]) - 1 and not any(given[1:])


@pytest.mark.feature("X08")
@pytest.mark.parametrize(("block_size", "reads"), [(4, True), (8, False)])
def test_a_successor_changes_nothing(
    oracle: Any, wanted: dict[str, Any], block_size: int, reads: bool
) -> None:
    """It has the KV of what runs, or computes it where its blocks are others."""
    config = config_for(oracle, role=Role.MIXED)
    cache = replace(config.cache, block_size=block_size)
    successor = replace(config, cache=cache, kv_hash="" if reads else "of other blocks")
    old, new = RunningLeader(config), RunningLeader(successor, "new")

    def told(old_state: str, new_state: str) -> list[LeaderReport]:
        return [
            LeaderReport("mixed", name, 0, 0, state, leader.leader.inbox, Hashes("test", kv), "")
            for name, state, leader, kv in (
                (REPLICA, old_state, old, config.kv_hash),
                ("new", new_state, new, successor.kv_hash),
            )
        ]

    async def serve() -> list[list[EngineOutput]]:
        async with routing({"mixed": [old.leader.inbox]}) as router:
            directory = router._directory
            directory.see(told("ready", "ready"))
            async with asyncio.timeout(60):
                while not all(leader.can_take() for leader in directory._leaders.values()):
                    await asyncio.sleep(0.005)
            directory.see(told("ready", "stuck"))
            have_begun = asyncio.Event()

            async def one(name: str) -> list[EngineOutput]:
                found = []
                async with aclosing(router.generate(request_for(name, PROMPTS[name]))) as outputs:
                    async for output in outputs:
                        found.append(output)
                        if name == "greedy" and len(found) == 5:
                            have_begun.set()
                return found

            running = [asyncio.create_task(one(name)) for name in CASES]
            await have_begun.wait()
            directory.see(told("draining", "ready"))
            return await asyncio.gather(*running)

    try:
        served = asyncio.run(serve())
        counts = new.leader.counts()
    finally:
        old.close()
        new.close()
    for name, outputs in zip(CASES, served, strict=True):
        assert tokens_of(outputs) == tokens_of(wanted[name]), name
        _check_logprobs(outputs, wanted[name])
    assert (counts["kv_transfers_total",] > 0) == reads
