"""The token socket: whose outputs reach a mailbox, and whose are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from cluster.messages import Abort, EngineOutput, OutputFrame, decode, encode, header_bytes
from serve import tokens as tokens_module
from serve.tokens import TokenSocket

HEADER = header_bytes("same")


def frame(
    epoch: int, inbox: str, token: int, engine_id: str = "mixed/a/0", finish_reason: str = ""
) -> bytes:
    output = EngineOutput("r", 0, [token], [], finish_reason, -1, 0, None, "", [])
    return encode(OutputFrame(epoch, engine_id, inbox, [output]))


@asynccontextmanager
async def token_socket() -> AsyncIterator[tuple[TokenSocket, zmq.Socket[bytes]]]:
    """Open a token socket, and an engine's end that leads to it."""
    tokens = TokenSocket("127.0.0.1", HEADER)
    with zmq.Context() as context, context.socket(zmq.PUSH) as engine:
        engine.linger = 0
        engine.connect(tokens.address)
        try:
            yield tokens, engine
        finally:
            tokens.shutdown()
            await asyncio.gather(tokens.task, return_exceptions=True)


def test_outputs_of_an_old_epoch_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[int]:
        async with token_socket() as (tokens, engine):
            mailbox = tokens.open("r")
            for epoch, token in ((1, 5), (2, 6), (1, 7), (2, 8)):
                engine.send_multipart([HEADER, frame(epoch, f"inbox {epoch}", token)])
            engine.send_multipart([HEADER, frame(0, "another's", 9, "mixed/b/0")])
            async with asyncio.timeout(5):
                return [(await mailbox.get()).token_ids[0] for _ in range(4)]

    assert asyncio.run(main()) == [5, 6, 8, 9]
    assert "mixed/a/0: epoch: wanted 2, found 1" in caplog.text


def test_aborts_go_to_the_newest_epoch_of_an_engine_alone() -> None:
    """An old one's address may be another's by now."""

    async def main() -> tuple[list[str], int]:
        context = zmq.Context()
        with context, context.socket(zmq.PULL) as old, context.socket(zmq.PULL) as new:
            async with token_socket() as (tokens, engine):
                ends = (old, new)
                ports = [end.bind_to_random_port("tcp://127.0.0.1") for end in ends]
                mailbox = tokens.open("r")
                for epoch, port in enumerate(ports):
                    engine.send_multipart([HEADER, frame(epoch, f"tcp://127.0.0.1:{port}", 5)])
                    async with asyncio.timeout(5):
                        await mailbox.get()
                tokens.abort(mailbox)
                await asyncio.sleep(0)
                assert await asyncio.to_thread(new.poll, 5000)
                found = decode(new.recv_multipart()[1], Abort).request_ids
                return found, old.poll(200)

    assert asyncio.run(main()) == (["r"], 0)


@pytest.mark.parametrize(
    ("finish_reason", "wanted"), [("", ["r"]), ("handoff", ["r"]), ("stop", None)]
)
def test_an_engine_that_works_for_nobody_is_told_so(
    finish_reason: str, wanted: list[str] | None
) -> None:
    """It had been silent for long, so the abort of a client that left at once did not reach it."""

    async def main() -> list[str] | None:
        with zmq.Context() as context, context.socket(zmq.PULL) as end:
            async with token_socket() as (tokens, engine):
                inbox = f"tcp://127.0.0.1:{end.bind_to_random_port('tcp://127.0.0.1')}"
                mailbox = tokens.open("r")
                tokens.close(mailbox)
                tokens.abort(mailbox)
                engine.send_multipart([HEADER, frame(0, inbox, 5, finish_reason=finish_reason)])
                if not await asyncio.to_thread(end.poll, 5000 if wanted else 300):
                    return None
                return decode(end.recv_multipart()[1], Abort).request_ids

    assert asyncio.run(main()) == wanted


def test_engines_that_are_gone_take_no_sockets_and_no_aborts_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engines of replaced replicas have other names, so that no epoch tells of their end."""

    async def main() -> tuple[list[str], set[str]]:
        context = zmq.Context()
        with context, context.socket(zmq.PULL) as alive:
            address = f"tcp://127.0.0.1:{alive.bind_to_random_port('tcp://127.0.0.1')}"
            async with token_socket() as (tokens, engine):
                mailbox = tokens.open("r")
                for name, inbox in (("old", "tcp://127.0.0.1:9"), ("bad", "no address")):
                    engine.send_multipart([HEADER, frame(0, inbox, 5, f"mixed/{name}/0")])
                engine.send_multipart([HEADER, frame(0, address, 5)])
                async with asyncio.timeout(5):
                    for _ in range(3):
                        await mailbox.get()
                tokens._heard_at["tcp://127.0.0.1:9"] -= 2 * tokens_module.FORGET_AFTER_S
                tokens.abort(mailbox)
                await asyncio.sleep(0)
                assert await asyncio.to_thread(alive.poll, 5000)
                return decode(alive.recv_multipart()[1], Abort).request_ids, set(tokens._newest)

    found, known = asyncio.run(main())
    assert found == ["r"] and known == {"mixed/bad/0", "mixed/a/0"}
    assert "no address cannot be told of aborts" in caplog.text
