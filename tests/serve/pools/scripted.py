"""What the tests of pools share: reports of leaders, connections that note and answer, outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cluster.actors.reports import LeaderReport
from cluster.observe.metrics import SchedulerStats
from cluster.wire.credentials import Hashes
from cluster.wire.messages import (
    Abort,
    EngineOutput,
    FinishReason,
    GenerateRequest,
    Hello,
    Inbound,
    Sampling,
    Submit,
    decode,
)
from serve.pools.chooser import Routing
from serve.pools.directory import ConnectedLeader, Directory
from serve.pools.leader_load import Stage

OURS, THEIRS = Hashes("ours", "kv"), Hashes("theirs", "kv")
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0, 8, (), -1, -1, None, None)


def request_of(request_id: str = "r", prompt: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest(request_id, prompt or [1, 2], [], GREEDY, b"")


def stage_of(request_id: str = "r", prompt: list[int] | None = None) -> Stage:
    return Stage(request_of(request_id, prompt), None, 16)


def output_of(
    position: int, token_ids: list[int], finish_reason: str = "", request_id: str = "r"
) -> EngineOutput:
    ended = EngineOutput.ended(request_id, FinishReason(finish_reason), position=position)
    return msgspec.structs.replace(ended, token_ids=token_ids)


def report_of(
    pool: str = "mixed",
    replica: str = "r",
    dp_rank: int = 0,
    *,
    load: tuple[int, int] = (0, 0),
    **fields: Any,
) -> LeaderReport:
    """Return the report of a ready leader, which runs and has waiting so many."""
    known = {"epoch": 0, "state": "ready", "inbox": "tcp://127.0.0.1:9", "hashes": OURS}
    stats = SchedulerStats(num_running=load[0], num_waiting=load[1])
    return LeaderReport(pool, replica, dp_rank, **known | {"last_end": ""} | fields, load=stats)


class ScriptedConnection:
    """Notes what is sent to a leader, and says what the leader would. A submission is answered by
    `on_submit`."""

    def __init__(
        self, leader: ConnectedLeader, on_submit: Callable[[ScriptedConnection, Submit], None]
    ):
        self.leader = leader
        self.epoch = leader.report.epoch
        self.sent: list[Any] = []
        self.is_closed = False
        self._on_submit = on_submit

    def send(self, body: bytes) -> None:
        assert not self.is_closed
        message = decode(body, Inbound)
        self.sent.append(message)
        if isinstance(message, Submit):
            self._on_submit(self, message)

    def close(self) -> None:
        self.is_closed = True

    def submitted(self) -> list[str]:
        return [each.request.request_id for each in self.sent if isinstance(each, Submit)]

    def aborted(self) -> list[list[str]]:
        """Return the request ids of each frame of aborts."""
        return [each.request_ids for each in self.sent if isinstance(each, Abort)]


class Connections:
    """All that a directory has opened, by engine id the newest; a leader answers at once, unless
    it is one of `silent`."""

    def __init__(
        self,
        routings: Mapping[str, Routing] | None = None,
        max_wait_s: float = 60.0,
        on_submit: Callable[[ScriptedConnection, Submit], None] = lambda to, submit: None,
        max_on_decode: int = 0,
    ) -> None:
        self.newest: dict[str, ScriptedConnection] = {}
        self.all: list[ScriptedConnection] = []
        self.silent: set[str] = set()
        self._on_submit = on_submit
        self.directory = Directory(
            routings or {"mixed": Routing.LEAST_REQUESTS},
            self._connect,
            numerics_hash=OURS.numerics,
            max_wait_s=max_wait_s,
            max_on_decode=max_on_decode,
        )

    def __getitem__(self, engine_id: str) -> ScriptedConnection:
        return self.newest[engine_id]

    def see(self, *reports: LeaderReport) -> None:
        """Take what a board says; leaders that are newly connected to answer."""
        num_before = len(self.all)
        self.directory.see(reports)
        for made in self.all[num_before:]:
            assert made.sent[0] == Hello(made.leader.report.engine_id, made.epoch)
            if made.leader.report.engine_id not in self.silent:
                made.leader.on_welcome()

    def _connect(self, inbox: str, leader: ConnectedLeader) -> ScriptedConnection:
        made = ScriptedConnection(leader, self._on_submit)
        self.newest[leader.report.engine_id] = made
        self.all.append(made)
        return made
