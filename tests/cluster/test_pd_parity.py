"""A prefill and a decode leader with a router between them generate what one engine generates.

Everything is real but Ray: sockets, KV transfer, leaders' loops, the router. A pool's handle call
is a frame into its leader's inbox.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import zmq

from cluster.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    Role,
    SchedulerConfig,
    TransferConfig,
)
from cluster.credentials import Credentials
from cluster.messages import EngineOutput, GenerateRequest, Sampling
from cluster.rank.follower import Follower
from cluster.rank.leader import Leader
from cluster.rank.rendezvous import LeaderEndpoints
from cluster.rank.stats import RankStats
from cluster.wire.contexts import end_context
from cluster.wire.message_parts import pack
from cluster.wire.sockets import CurveHandshake, connecting_socket
from serve.router import Router
from serve.tokens import TokenSocket

SHAPES = ["one kv head", "six heads", "wide heads", "tied", "odd vocabulary", "biases"]
SHAPES += ["mistral window 7", "qwen2 window in the last layers", "qwen3 wide heads"]
CREDENTIALS = Credentials("test", b"s" * 32)
NUM_TOKENS = 64

T = TypeVar("T")


class LocalPool:
    """A leader and its followers, each on a thread of this process, called as a pool is."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.parallel.tensor_parallel_size
        endpoints = LeaderEndpoints(config, host="127.0.0.1", credentials=CREDENTIALS)
        with ThreadPoolExecutor(size) as threads:
            joining = [
                threads.submit(
                    Follower,
                    config,
                    dp_rank=0,
                    tp_rank=tp_rank,
                    epoch=0,
                    host="127.0.0.1",
                    credentials=CREDENTIALS,
                    rendezvous=endpoints.rendezvous,
                )
                for tp_rank in range(1, size)
            ]
            self.leader = Leader(
                config,
                engine_id=config.role.value,
                epoch=0,
                host="127.0.0.1",
                credentials=CREDENTIALS,
                endpoints=endpoints,
            )
            self.followers = [future.result() for future in joining]
        self._threads = [
            threading.Thread(target=rank.run, daemon=True)
            for rank in (self.leader, *self.followers)
        ]
        for thread in self._threads:
            thread.start()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        handshake = CurveHandshake(CREDENTIALS.secret)
        self._socket = connecting_socket(self._context, zmq.PUSH, handshake, max_waiting=1000)
        self._socket.connect(self.leader.inbox)

    def generate(self, request_id: str, frame: bytes) -> Any:
        self._socket.send_multipart(pack(frame, CREDENTIALS))
        return asyncio.get_running_loop().create_future()  # stays open; the router cancels it

    def stats(self) -> RankStats:
        return self.leader.stats(tp_rank=0, dp_rank=0, pid=0, node="")

    def all_stats(self) -> list[RankStats]:
        """The figures of every rank."""
        return [
            rank.stats(tp_rank=i, dp_rank=0, pid=0, node="")
            for i, rank in enumerate([self.leader, *self.followers])
        ]

    def close(self) -> None:
        self.leader.stop()  # which is the followers' end too
        for thread in self._threads:
            thread.join(timeout=10)
            assert not thread.is_alive()
        end_context(self._context, "test", linger=0)


@contextmanager
def pools(
    oracle: Any,
    transport: str,
    *,
    num_kv_blocks: int = 400,
    lease_s: float = 30.0,
    tensor_parallel_size: int = 1,
) -> Iterator[dict[str, LocalPool]]:
    config = EngineConfig(
        model_path=str(oracle.path),
        max_model_len=256,
        cache=CacheConfig(block_size=4, num_kv_blocks=num_kv_blocks),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
        transfer=TransferConfig(transport=transport, lease_s=lease_s),
        parallel=ParallelConfig(tensor_parallel_size),
    )
    made = {
        role.value: LocalPool(replace(config, role=role)) for role in (Role.PREFILL, Role.DECODE)
    }
    try:
        yield made
    finally:
        for pool in made.values():
            pool.close()


def make_request(
    i: int, prompt: list[int], num_tokens: int = NUM_TOKENS, **fields: Any
) -> GenerateRequest:
    sampling = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "max_tokens": num_tokens,
        "stop_token_ids": (),
        "num_logprobs": -1,
        "num_prompt_logprobs": -1,
        "rules": None,
    }
    return GenerateRequest(str(i), prompt, [], Sampling(**{**sampling, **fields}), "")


async def generate(router: Router, request: GenerateRequest) -> list[EngineOutput]:
    async with aclosing(router.generate(request)) as outputs:
        return [output async for output in outputs]


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def prompts_for(oracle: Any, seed: int, n: int) -> list[list[int]]:
    rng = random.Random(seed)
    vocab = oracle.model.config.vocab_size
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, 150))] for _ in range(n)]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def is_empty(pool: LocalPool) -> bool:
    stats = pool.stats()
    return stats.num_free_blocks == stats.num_blocks and stats.num_running == 0


def with_router(made: dict[str, LocalPool], work: Callable[[Router], Awaitable[T]]) -> T:
    """Return what `work` makes of a router over the pools."""

    async def main() -> T:
        socket = TokenSocket("127.0.0.1", CREDENTIALS)
        try:
            return await work(Router(dict(made), socket))
        finally:
            socket.shutdown()

    return asyncio.run(main())


def answers(made: dict[str, LocalPool], prompts: list[list[int]]) -> list[list[EngineOutput]]:
    """Return each prompt's outputs, all submitted at once; nothing of them is left behind."""

    async def serve(router: Router) -> list[list[EngineOutput]]:
        requests = [make_request(i, prompt) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(generate(router, r) for r in requests))
        await until(lambda: all(is_empty(pool) for pool in made.values()))
        return results

    return with_router(made, serve)


def lose_first_tickets(pool_rank: Leader | Follower) -> list[str]:
    """Let a prefill rank forget the ticket of each request's first attempt; return whose."""
    assert pool_rank.transfer.server is not None
    # Under the server's lock: a reader that is early must not release the ticket in between.
    holder = pool_rank.transfer.server._holder
    real_hold, lost = holder.hold, list[str]()

    def hold_and_lose(request_id: str, blocks: list[int], generations: list[int]) -> int:
        ticket = real_hold(request_id, blocks, generations)
        if request_id.endswith(".0"):
            lost.append(request_id)
            holder.drop(ticket)
        return ticket

    holder.hold = hold_and_lose  # type: ignore[method-assign]
    return lost


async def cut_all(router: Router, prompts: list[list[int]], max_outputs: int) -> None:
    """Ask for long answers, and leave each after one to `max_outputs` outputs."""
    rng = random.Random(3)

    async def cut(i: int, prompt: list[int]) -> None:
        num_left = rng.randint(1, max_outputs)
        async with aclosing(router.generate(make_request(i, prompt, 100))) as outputs:
            async for _ in outputs:
                num_left -= 1
                if not num_left:
                    return

    await asyncio.gather(*(cut(i, p) for i, p in enumerate(prompts)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_two_pools_equal_transformers(
    make_oracle: Callable[[str], Any], shape: str, transport: str
) -> None:
    oracle = make_oracle(shape)
    prompts = prompts_for(oracle, 11, 10)
    # The decode pool holds 100 blocks of 4 tokens: ten sequences do not fit at once.
    with pools(oracle, transport, num_kv_blocks=150) as made:
        results = answers(made, prompts)
        prefill, decode = made["prefill"].stats(), made["decode"].stats()
    for prompt, outputs in zip(prompts, results, strict=True):
        assert outputs[-1].finish_reason == "length"
        assert len(tokens(outputs)) == NUM_TOKENS
        oracle.check_greedy(prompt, tokens(outputs))
    oracle.report_ties()
    assert prefill.kv_bytes_sent == decode.kv_bytes_received > 0
    assert prefill.prompt_tokens_computed == sum(map(len, prompts))
    # Pre-empted sequences are computed again where they are; without pre-emption, none.
    num_preemptions = made["decode"].leader.engine.stats().num_preemptions
    assert (decode.prompt_tokens_computed == 0) == (num_preemptions == 0)


@pytest.mark.parametrize(
    ("shape", "transport"), [("one kv head", "shm"), ("wide heads", "tcp"), ("tied", "shm")]
)
def test_two_pools_of_two_ranks_equal_transformers(
    make_oracle: Callable[[str], Any], shape: str, transport: str
) -> None:
    """Each decode rank pulls its slice from the prefill rank of the same place."""
    oracle = make_oracle(shape)
    prompts = prompts_for(oracle, 16, 6)
    with pools(oracle, transport, num_kv_blocks=150, tensor_parallel_size=2) as made:
        results = answers(made, prompts)
        prefill, decode = made["prefill"].all_stats(), made["decode"].all_stats()
    for prompt, outputs in zip(prompts, results, strict=True):
        assert len(tokens(outputs)) == NUM_TOKENS
        oracle.check_greedy(prompt, tokens(outputs))
    oracle.report_ties()
    assert [rank.held_tickets for rank in prefill] == [0, 0]
    for leader, follower in (prefill, decode):
        assert 0 < follower.step <= leader.step  # a leader also counts steps without work
    sent = [rank.kv_bytes_sent for rank in prefill]
    assert sent == [rank.kv_bytes_received for rank in decode]
    assert sent[0] == sent[1] > 0  # equal slices


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_roomy_decode_rank_computes_no_prompt_token(
    make_oracle: Callable[[str], Any], transport: str
) -> None:
    oracle = make_oracle("six heads")
    prompts = prompts_for(oracle, 12, 8)
    with pools(oracle, transport, num_kv_blocks=900) as made:
        answers(made, prompts)
        prefill, decode = made["prefill"].stats(), made["decode"].stats()
    assert decode.prompt_tokens_computed == 0
    spec = made["prefill"].leader.runner.kv_spec
    blocks = sum(-(-len(prompt) // 4) for prompt in prompts)
    assert prefill.kv_bytes_sent == decode.kv_bytes_received == blocks * spec.block_bytes


def test_seeded_samples_do_not_depend_on_the_pools(make_oracle: Callable[[str], Any]) -> None:
    oracle = make_oracle("tied")
    [prompt] = prompts_for(oracle, 13, 1)
    request = make_request(0, prompt, temperature=0.9, top_k=40, top_p=0.95, seed=2**63 + 5)
    with pools(oracle, "shm") as made:
        mixed = LocalPool(replace(made["decode"].leader.config, role=Role.MIXED))
        try:
            two = with_router(made, lambda router: generate(router, request))
            one = with_router({"mixed": mixed}, lambda router: generate(router, request))
        finally:
            mixed.close()
    assert tokens(two) == tokens(one)


def test_a_request_that_is_closed_leaves_nothing_behind(make_oracle: Callable[[str], Any]) -> None:
    oracle = make_oracle("tied")
    prompts = prompts_for(oracle, 14, 40)
    with pools(oracle, "shm") as made:

        async def serve(router: Router) -> None:
            await cut_all(router, prompts, 30)
            await until(lambda: all(is_empty(pool) for pool in made.values()), 1.0)
            # The next request is right.
            outputs = await generate(router, make_request(999, prompts[0]))
            oracle.check_greedy(prompts[0], tokens(outputs))

        with_router(made, serve)


def test_lost_kv_is_prefilled_again(make_oracle: Callable[[str], Any]) -> None:
    """The prefill engine forgets its tickets: the client sees the same tokens all the same."""
    oracle = make_oracle("six heads")
    prompts = prompts_for(oracle, 15, 4)
    with pools(oracle, "shm") as made:
        lost = lose_first_tickets(made["prefill"].leader)
        results = answers(made, prompts)
    assert len(lost) == len(prompts)
    for prompt, outputs in zip(prompts, results, strict=True):
        assert len(tokens(outputs)) == NUM_TOKENS
        oracle.check_greedy(prompt, tokens(outputs))


def test_kv_that_one_rank_lost_is_prefilled_again(make_oracle: Callable[[str], Any]) -> None:
    """Three of four ranks do their part; blocks come back and tokens are right all the same."""
    oracle = make_oracle("tied")
    prompts = prompts_for(oracle, 17, 4)
    with pools(oracle, "shm", tensor_parallel_size=2) as made:
        lost = lose_first_tickets(made["prefill"].followers[0])
        results = answers(made, prompts)
        prefill, decode = made["prefill"].all_stats(), made["decode"].all_stats()
    assert len(lost) == len(prompts)
    for prompt, outputs in zip(prompts, results, strict=True):
        assert len(tokens(outputs)) == NUM_TOKENS
        oracle.check_greedy(prompt, tokens(outputs))
    # The first try's slice of rank 0 was sent and received; it was of no use without rank 1's.
    sent = [rank.kv_bytes_sent for rank in prefill]
    assert sent == [rank.kv_bytes_received for rank in decode]
    assert sent[0] == 2 * sent[1] > 0
    assert [rank.held_tickets for rank in prefill] == [0, 0]


def test_closed_requests_leave_nothing_behind_on_any_rank(
    make_oracle: Callable[[str], Any],
) -> None:
    oracle = make_oracle("tied")
    prompts = prompts_for(oracle, 18, 12)
    with pools(oracle, "tcp", num_kv_blocks=150, tensor_parallel_size=2) as made:

        async def serve(router: Router) -> None:
            await cut_all(router, prompts, 6)
            await until(lambda: all(is_empty(pool) for pool in made.values()))
            ranks = made["prefill"].all_stats
            await until(lambda: not any(rank.held_tickets for rank in ranks()))
            outputs = await generate(router, make_request(999, prompts[0]))
            oracle.check_greedy(prompts[0], tokens(outputs))

        with_router(made, serve)


@pytest.mark.feature("S06")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_only_the_window_is_handed_over(make_oracle: Callable[[str], Any], transport: str) -> None:
    oracle = make_oracle("mistral window 7")
    prompts = [[i % 200 for i in range(start, start + 81)] for start in (0, 300, 850)]
    with pools(oracle, transport) as made:
        results = answers(made, prompts)
        received = made["decode"].stats().kv_bytes_received
    for prompt, outputs in zip(prompts, results, strict=True):
        oracle.check_greedy(prompt, tokens(outputs))
    # The next token is the 82nd: it reads positions 75 to 80, in the blocks 18, 19 and 20.
    assert received == 3 * len(prompts) * made["prefill"].leader.runner.kv_spec.block_bytes
