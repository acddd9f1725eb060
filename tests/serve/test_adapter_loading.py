"""Adapters that come and go while an application serves: its ingresses, replicas and board, without
Ray and without ranks. What ranks do with an adapter is said by a scripted group."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from cluster.actors.adapter_set import AdapterSet, LoadCall, StoredAdapters, UnloadCall
from cluster.actors.rank_group import RankGroup
from cluster.actors.reports import BoardSilent, GroupReport, IngressReport, PushAnswer
from cluster.actors.status_board import StatusBoard
from cluster.group.context import LoadedAdapters, RankPlace, RankStats
from cluster.observe.metrics import MetricsSnapshot
from cluster.wire.credentials import Hashes
from cluster.wire.messages import (
    FIRST_LOADED_ID,
    EngineOutput,
    FinishReason,
    Inbound,
    LoraAdapter,
    Submit,
    decode,
)
from compile.errors import FieldError
from serve import adapter_loading, ingress_core
from serve.config import DeployConfig, deploy_config
from serve.event_loop import StreamBatcher
from serve.ingress_core import IngressCore
from serve.openai import adapters as by_http
from serve.openai.app import build_app
from serve.openai.endpoint import RequestRefused
from serve.pools import pool_core
from serve.pools.directory import ConnectedLeader, Connection, Directory
from serve.pools.pool_core import PoolCore
from serve.pools.router import Router

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ROOT, CLIENT = ({"Authorization": f"Bearer {key}"} for key in ("root", "client"))


class Kept:
    """What the control service keeps of adapters."""

    def __init__(self) -> None:
        self.stored = StoredAdapters()

    def load(self) -> StoredAdapters:
        return self.stored

    def save(self, stored: StoredAdapters) -> None:
        self.stored = stored


class Group:
    """A rank group of one leader, which loads what it is told of unless `says` has an error for
    its name, or `is_slow`."""

    epoch, is_named_by_watchdog, verdict = 0, False, ""

    def __init__(self, inbox: str) -> None:
        self.handles, self.inboxes = [None], [inbox]
        self.told: tuple[LoraAdapter, ...] = ()
        self.says: dict[str, str] = {}
        self.is_slow = False

    async def set_adapters(self, adapters: tuple[LoraAdapter, ...]) -> None:
        self.told = adapters

    async def report(self, prefixes_since: Mapping[int, int] | None = None) -> GroupReport:
        errors = {each.id: self.says[each.name] for each in self.told if each.name in self.says}
        ids = frozenset() if self.is_slow else frozenset(each.id for each in self.told)
        loaded = LoadedAdapters(ids - errors.keys(), errors)
        return GroupReport([RankStats(RankPlace(), 7, "", "ready", adapters=loaded)], [])

    async def start(self) -> None:
        """It serves at once."""

    async def stop(self) -> None:
        """It ends at once."""

    async def wait_for_end(self) -> str:
        await asyncio.Event().wait()
        return ""


class Replica:
    """The `PoolShell` of a real core."""

    def __init__(self, application: Application, name: str) -> None:
        self.group = Group(f"tcp://{name}")
        self._application = application
        hashes = Hashes(application.config.numerics_hash)
        self.core = PoolCore("mixed", name, hashes, self)

    def new_group(self, epoch: int) -> RankGroup:
        return self.group  # type: ignore[return-value]

    async def push(self, report: Any, group: RankGroup) -> PushAnswer:
        answer = self._application.board.push(report)
        assert isinstance(answer, PushAnswer)
        return answer

    async def final_failure(self) -> str:
        return ""

    async def note_failure(self, reason: str, is_final: bool) -> None:
        """Nobody asks."""

    async def note_recovery(self) -> None:
        """Nobody asks."""


class OneBoard:
    """An ingress's way to the board."""

    is_new = False

    def __init__(self, application: Application) -> None:
        self._application = application
        self.is_silent = False

    @property
    def _board(self) -> StatusBoard:
        if self.is_silent:
            raise BoardSilent("RayActorError")
        return self._application.board

    async def poll(self, report: IngressReport) -> dict[str, Any]:
        return self._board.poll(report)

    async def load_adapter(self, call: LoadCall) -> AdapterSet:
        found = self._board.load_adapter(call)
        if isinstance(found, FieldError):
            raise found
        return found

    async def unload_adapter(self, call: UnloadCall) -> AdapterSet | None:
        return self._board.unload_adapter(call)

    async def metrics(self, ingress_id: str, counts: Any) -> MetricsSnapshot:
        return self._board.metrics(ingress_id, counts)

    async def free_resources(self) -> dict[str, float]:
        return {}

    async def debug_ranks(self) -> dict[str, Any]:
        return {}


class Wire:
    """A connection that notes what is submitted."""

    def __init__(
        self, leader: ConnectedLeader, submitted: list[tuple[ConnectedLeader, Submit]]
    ) -> None:
        self._leader, self._submitted = leader, submitted

    def send(self, body: bytes) -> None:
        if isinstance(message := decode(body, Inbound), Submit):
            self._submitted.append((self._leader, message))

    def close(self) -> None:
        """Nothing is held."""


class Application:
    """Ingresses, replicas of a mixed pool, and their board, as far as they are started."""

    def __init__(self, config: DeployConfig) -> None:
        self.config = config
        self.kept: Any = Kept()
        self.replicas: list[Replica] = []
        self.cores: list[IngressCore] = []
        self.boards: list[OneBoard] = []
        self.apps: list[Starlette] = []
        self.submitted: list[tuple[ConnectedLeader, Submit]] = []
        self.make_board()

    def make_board(self) -> None:
        """Make one, in place of another if there was one. It has been there for long."""
        self.board = StatusBoard(["mixed"], kept_adapters=self.kept)
        self.board._made_at = -math.inf

    async def add_replica(self) -> Replica:
        replica = Replica(self, f"r{len(self.replicas)}")
        replica.core.spawn(replica.core.report())
        await replica.core.start()
        self.replicas.append(replica)
        return replica

    async def add_ingress(self) -> None:
        def connect(inbox: str, leader: ConnectedLeader) -> Connection:
            asyncio.get_running_loop().call_soon(leader.on_welcome)
            return Wire(leader, self.submitted)

        tick, pool = StreamBatcher(), self.config.pools[0]
        directory = Directory(
            {"mixed": pool.routing},
            connect,
            numerics_hash=self.config.numerics_hash,
            max_wait_s=60.0,
        )
        board = OneBoard(self)
        core = IngressCore(
            self.config,
            board,
            directory,
            Router(directory, "mixed", tick),
            tick,
            ingress_id=f"i{len(self.cores)}",
            node="10.0.0.1",
            secret=b"s" * 32,
        )
        self.cores.append(core)
        self.boards.append(board)
        self.apps.append(build_app(core.serving))
        await core.start(is_first=False)
        await until(core.is_ready)

    async def ask(
        self, method: str, path: str, body: Any = None, *, at: int = 0, key: Any = CLIENT
    ) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.apps[at])
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body, headers=key)

    async def load(self, name: str, path: Any, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path)}
        return await self.ask("POST", LOAD, body, **{"key": ROOT, **more})

    async def unload(self, name: str, **more: Any) -> httpx.Response:
        return await self.ask("POST", UNLOAD, {"lora_name": name}, **{"key": ROOT, **more})

    async def names(self, at: int = 0) -> list[str]:
        answer = await self.ask("GET", "/v1/models", at=at)
        return [card["id"] for card in answer.json()["data"]]

    def complete(self, model: str, at: int = 0) -> asyncio.Task[httpx.Response]:
        """Begin a request of one token."""
        body = {"model": model, "prompt": [70, 71], "max_tokens": 1}
        return asyncio.create_task(self.ask("POST", "/v1/completions", body, at=at))

    def finish(self) -> list[tuple[str, int]]:
        """Let all requests end that were submitted; return the replica and the adapter of each."""
        found, self.submitted[:] = [*self.submitted], []
        for leader, submit in found:
            ended = EngineOutput.ended(submit.request.request_id, FinishReason.LENGTH, position=0)
            leader.deliver(msgspec.structs.replace(ended, token_ids=[72]))
        return [(leader.report.replica_id, submit.request.adapter_id) for leader, submit in found]


async def until(is_over: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not is_over():
            await asyncio.sleep(0.01)


def write_adapter(path: Path, rank: int = 4, **fields: Any) -> Path:
    path.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, **fields}
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "adapter_model.safetensors").write_bytes(path.name.encode())
    return path


@pytest.fixture
def sql(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "sql")


Running = Callable[..., Any]


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """An application with room for two adapters beside `fixed`: `async with running(2) as app`."""
    monkeypatch.setattr(ingress_core, "POLL_PERIOD_S", 0.01)
    monkeypatch.setattr(pool_core, "REPORT_PERIOD_S", 0.01)
    fixed = write_adapter(tmp_path / "fixed")

    @asynccontextmanager
    async def run(num_ingresses: int = 1, **options: Any) -> AsyncIterator[Application]:
        loading = {"max_loras": 3, "max_lora_rank": 8, "admin_keys": "root", **options}
        config = deploy_config(
            {"pools": "mixed", "O": 0, "device": "cpu", "api_keys": "client", "max_num_seqs": 8}
            | {"lora_modules": f"fixed={fixed}", "ingress.replicas": num_ingresses}
            | {name: value for name, value in loading.items() if value is not None}
        )
        application = Application(config)
        async with AsyncExitStack() as stack:
            stack.callback(gc.unfreeze)
            for _ in range(2):
                replica = await application.add_replica()
                stack.push_async_callback(replica.core.stop)
            for _ in range(num_ingresses):
                await application.add_ingress()
                stack.push_async_callback(application.cores[-1].close)
            yield application
            for core in application.cores:
                core.check_health()
                for task in core._tasks:
                    task.cancel()

    return run


@pytest.mark.feature("S10")
async def test_all_ingresses_offer_an_adapter_that_one_has_loaded(
    running: Running, sql: Path
) -> None:
    """Once every engine has it; and no more once another one has unloaded it."""
    async with running(2) as application:
        answer = await application.load("sql", sql)
        assert answer.status_code == 200, answer.text
        card = answer.json()
        assert (card["id"], card["object"], card["parent"]) == ("sql", "model", "lockstep-tiny")
        assert all([each.name for each in r.group.told] == ["sql"] for r in application.replicas)
        assert await application.names() == ["lockstep-tiny", "fixed", "sql"]
        models = application.cores[1].serving.models
        await until(lambda: models.by_name.get("sql"))
        assert (await application.ask("GET", "/v1/models/sql", at=1)).json()["parent"]
        document = (await application.ask("GET", "/openapi.json", at=1)).json()
        of_chat = document["components"]["schemas"]["ChatRequest"]["properties"]
        assert of_chat["model"]["enum"] == ["lockstep-tiny", "fixed", "sql", None]
        for name, adapter_id in (("sql", FIRST_LOADED_ID), ("fixed", 1), ("lockstep-tiny", 0)):
            asking = application.complete(name, at=1)
            await until(lambda: application.submitted)
            assert [lora for _, lora in application.finish()] == [adapter_id]
            answer = await asking
            assert answer.status_code == 200 and answer.json()["model"] == name
        answer = await application.unload("sql", at=1)
        assert answer.json() == {"id": "sql", "object": "model", "deleted": True}
        assert await application.names(1) == ["lockstep-tiny", "fixed"]
        await until(lambda: not application.cores[0].serving.models.by_name.get("sql"))
        assert (await application.complete("sql")).status_code == 404
        await until(lambda: not any(each.group.told for each in application.replicas))
        document = (await application.ask("GET", "/openapi.json", at=1)).json()
        assert "sql" not in str(document["components"]["schemas"]["ChatRequest"])


@pytest.mark.feature("S10")
async def test_requests_that_run_keep_an_adapter_that_is_unloaded(
    running: Running, sql: Path, tmp_path: Path
) -> None:
    """Its name is free for another one meanwhile, and requests that come have that."""
    other = write_adapter(tmp_path / "other")
    async with running(2) as application:
        await application.load("sql", sql)
        await until(lambda: application.cores[1].serving.models.by_name.get("sql"))
        asking = application.complete("sql", at=1)
        await until(lambda: application.submitted)
        assert (await application.unload("sql")).status_code == 200
        assert (await application.unload("sql")).status_code == 404
        answer = await application.load("sql", other)
        assert answer.status_code == 200, answer.text
        answer = await application.load("more", other)
        assert answer.status_code == 400 and "1 of them until its last request ends" in answer.text
        await until(lambda: application.cores[1].serving.models.by_name.get("sql"))
        told = [each.id for each in application.replicas[0].group.told]
        assert told == [FIRST_LOADED_ID + 1, FIRST_LOADED_ID]
        assert application.finish()[0][1] == FIRST_LOADED_ID
        assert (await asking).status_code == 200
        await until(lambda: len(application.replicas[0].group.told) == 1)
        assert not application.cores[1].serving.admission.used_adapters
        asking = application.complete("sql")
        await until(lambda: application.submitted)
        assert application.finish()[0][1] == FIRST_LOADED_ID + 1
        assert (await asking).status_code == 200
        # Neither what is refused later nor what its client leaves holds one.
        body = {"model": "sql", "prompt": [70], "max_tokens": 10_000}
        assert (await application.ask("POST", "/v1/completions", body)).status_code == 400
        leaving = application.complete("sql")
        await until(lambda: application.submitted)
        assert application.cores[0].serving.admission.used_adapters == {FIRST_LOADED_ID + 1}
        leaving.cancel()
        await until(lambda: not application.cores[0].serving.admission.used_adapters)


@pytest.mark.feature("S10")
async def test_replicas_that_start_later_and_a_board_made_anew_have_what_was_loaded(
    running: Running, sql: Path
) -> None:
    async with running(1) as application:
        await application.load("sql", sql)
        application.make_board()
        late = await application.add_replica()
        await until(lambda: late.group.told)
        for replica in application.replicas[:2]:
            replica.group.is_slow = True
        await until(lambda: len(application.cores[0]._directory.lacking(FIRST_LOADED_ID)) == 2)
        assert await application.names() == ["lockstep-tiny", "fixed", "sql"]
        for _ in range(4):
            asking = application.complete("sql")
            await until(lambda: application.submitted)
            assert application.finish() == [("r2", FIRST_LOADED_ID)]
            await asking
        for replica in application.replicas:
            replica.group.is_slow = False
        await application.unload("sql")
        application.make_board()
        assert (await application.load("sql", sql)).status_code == 200
        await until(lambda: [e.id for e in late.group.told] == [FIRST_LOADED_ID + 1])
        await late.core.stop()


@pytest.mark.feature("S10")
async def test_an_adapter_that_an_engine_cannot_load_is_nowhere(
    running: Running, sql: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(2) as application:
        group = application.replicas[1].group
        group.says["sql"] = "rank dp=0 tp=1: adapter_config.json: wanted a file, found none"
        answer = await application.load("sql", sql)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "lora_path" and error["message"] == (
            "lora_path: wanted an adapter that every engine can load, found mixed/r1/0 epoch=0: "
            "rank dp=0 tp=1: adapter_config.json: wanted a file, found none"
        )
        assert await application.names() == ["lockstep-tiny", "fixed"]
        await until(lambda: not application.replicas[0].group.told)
        group.says.clear()
        group.is_slow = True
        monkeypatch.setattr(adapter_loading, "LOAD_TIMEOUT_S", 0.2)
        answer = await application.load("sql", sql, at=1)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["message"] == (
            "lora_path: wanted it loaded within 0.2 s, found it missing at mixed/r1/0 epoch=0"
        )
        await until(lambda: not application.replicas[0].group.told)
        monkeypatch.setattr(adapter_loading, "LOAD_TIMEOUT_S", 300.0)
        # What has begun goes on without its client, until somebody else unloads it.
        loading = asyncio.create_task(application.load("sql", sql))
        await until(lambda: application.replicas[1].group.told)
        loading.cancel()
        await until(lambda: application.cores[1].serving.models.by_name.get("sql"))
        loading = asyncio.create_task(
            by_http.load_by_handle(application.cores[0].serving, "more", str(sql))
        )
        await until(lambda: len(application.replicas[1].group.told) == 2)
        assert (await application.unload("more", at=1)).status_code == 200
        with pytest.raises(RequestRefused, match="wanted one that stays while it is loaded"):
            await loading
        group.is_slow = False
        await until(lambda: not application.cores[0].serving.loading._running)
        assert await application.names() == ["lockstep-tiny", "fixed", "sql"]


@pytest.mark.feature("S10")
async def test_what_cannot_be_loaded_or_unloaded_is_told_by_its_field(
    running: Running, sql: Path, tmp_path: Path
) -> None:
    async with running(1) as application:
        for name in ("sql", "two"):
            assert (await application.load(name, sql)).status_code == 200
        wide = write_adapter(tmp_path / "wide", rank_pattern={"q_proj": 9})
        dora = write_adapter(tmp_path / "dora", use_dora=True)
        cases: list[tuple[str, Any, str]] = [
            ("sql", sql, "lora_name: wanted a name that is free, found 'sql'"),
            ("fixed", sql, "lora_name: wanted a name that is free, found 'fixed'"),
            ("lockstep-tiny", sql, "lora_name: wanted a name that is free, found 'lockstep-tiny'"),
            ("", sql, "lora_name: wanted 1 to 256 characters, found 0"),
            ("three", sql, "lora_name: wanted fewer than 2 that are loaded already (max_loras, "),
            ("three", "adapters/sql", "lora_path: wanted an absolute path, the same on all nodes"),
            ("three", tmp_path / "none", "lora_path: wanted an adapter that Lockstep can serve, "),
            ("three", dora, "lora_path: wanted an adapter that Lockstep can serve, found "),
            (
                "three",
                wide,
                "lora_path: wanted an adapter of rank at most 8 (max_lora_rank), found one of r",
            ),
        ]
        for name, path, message in cases:
            answer = await application.load(name, path)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"].startswith(message), answer.text
        bodies: list[tuple[str, dict[str, Any], str]] = [
            (LOAD, {"lora_name": "a"}, "lora_path: wanted a value, found none"),
            (LOAD, {"lora_name": "a", "lora_path": "/a", "load_inplace": True}, "load_inplace: "),
            (LOAD, {"lora_name": "a", "lora_path": "/a", "lora_int_id": 7}, "lora_int_id: wanted "),
            (LOAD, {"lora_name": "a", "lora_path": "/a", "path": 7}, "path: unknown field"),
            (UNLOAD, {"lora_name": "a", "lora_int_id": 7}, "lora_int_id: wanted null, found 7"),
            (UNLOAD, {"lora_name": "fixed"}, "lora_name: wanted an adapter that was loaded while"),
            (UNLOAD, {"lora_name": "lockstep-tiny"}, "lora_name: wanted an adapter that was load"),
        ]
        for path, body, message in bodies:
            answer = await application.ask("POST", path, body, key=ROOT)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"].startswith(message), answer.text
        answer = await application.unload("none")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")
        large = {"lora_name": "a", "lora_path": "/" * 100_000}
        assert (await application.ask("POST", LOAD, large, key=ROOT)).status_code == 413
        with pytest.raises(RequestRefused, match=r"^400: lora_name: wanted a name that is free"):
            await by_http.load_by_handle(application.cores[0].serving, "sql", str(sql))
        found = await by_http.unload_by_handle(application.cores[0].serving, "sql")
        assert found == {"id": "sql", "object": "model", "deleted": True}
        await until(lambda: len(application.replicas[0].group.told) == 1)
        found = await by_http.load_by_handle(application.cores[0].serving, "again", str(sql))
        assert found["id"] == "again" and found["parent"] == "lockstep-tiny"
        application.boards[0].is_silent = True
        for answer in (await application.unload("two"), await application.load("new", sql)):
            assert answer.status_code == 503 and "status board: wanted an answer" in answer.text


@pytest.mark.feature("S10")
@pytest.mark.parametrize("open_paths", ["/health", f"{LOAD},{UNLOAD}"])
async def test_only_who_administers_may_load(running: Running, sql: Path, open_paths: str) -> None:
    async with running(1, open_paths=open_paths) as application:
        keys: list[tuple[Any, int]] = [
            ({}, 401),
            ({"Authorization": "Basic root"}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            (CLIENT, 403),
        ]
        for key, status in keys:
            for answer in (
                await application.load("sql", sql, key=key),
                await application.unload("sql", key=key),
            ):
                assert answer.status_code == status, answer.text
                assert ("www-authenticate" in answer.headers) == (status == 401)
                assert "root" not in answer.text
        assert await application.names() == ["lockstep-tiny", "fixed"]
        assert (await application.ask("GET", "/v1/models", key=ROOT)).status_code == 401
        assert (await application.load("sql", sql)).status_code == 200
        assert (await application.unload("sql")).status_code == 200


@pytest.mark.feature("S10")
async def test_without_places_for_them_no_adapters_are_loaded(running: Running, sql: Path) -> None:
    """Neither those that others of the same numerics have loaded."""
    none: Any = dict.fromkeys(("max_loras", "max_lora_rank", "admin_keys"))
    async with running(1, **none) as application:
        numerics_hash = application.config.numerics_hash
        application.board.load_adapter(LoadCall(numerics_hash, "sql", str(sql), b"", 1))
        await until(lambda: application.replicas[0].group.told)
        for answer in (
            await application.load("sql", sql, key=CLIENT),
            await application.unload("sql", key=CLIENT),
        ):
            assert answer.status_code == 404 and "max_loras: wanted places for" in answer.text
        assert await application.names() == ["lockstep-tiny", "fixed"]
