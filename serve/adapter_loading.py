"""`AdapterLoading`: how an ingress loads and unloads adapters for its whole application.

1. The files are checked here, beside the event loop: what no engine could load gets no further.
2. The status board adds the adapter to what all engines and ingresses are to have, if its name is
   free and so is a place.
3. Each engine reads it between two steps. This ingress waits until all that take requests have it.
   If one cannot, or does not in time, it is unloaded again everywhere.

What has begun goes on to its end, whether or not its client waits for that. An ingress that dies
meanwhile leaves the adapter loading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cluster.actors.adapter_set import AdapterSet, LoadCall, UnloadCall
from cluster.actors.reports import BoardSilent
from cluster.config import EngineConfig
from cluster.wire.messages import LoraAdapter
from compile.errors import FieldError, Words
from model.config import fingerprint
from model.lora_config import LoraConfig
from serve.config import RETRY_AFTER_S
from serve.openai.errors import ApiError
from serve.pools.directory import Directory
from serve.served_models import ServedModel, ServedModels

LOAD_TIMEOUT_S = 60.0
"""How long engines may take to load an adapter; then it is unloaded again, and its request gets
503."""
T = TypeVar("T")


class AdapterBoard(Protocol):
    """What the status board does for it; either raises BoardSilent."""

    async def load_adapter(self, call: LoadCall) -> AdapterSet: ...
    async def unload_adapter(self, call: UnloadCall) -> AdapterSet | None: ...


class AdapterLoading:
    """Belongs to the event loop of its ingress."""

    def __init__(
        self,
        engine: EngineConfig,
        numerics_hash: str,
        models: ServedModels,
        board: AdapterBoard,
        directory: Directory,
    ) -> None:
        """`engine`: any of the application's, which all have the same places for adapters."""
        self._max_loaded = engine.max_loras - len(engine.lora_modules)
        self._max_rank = engine.max_lora_rank
        self._numerics_hash = numerics_hash
        self._models = models
        self._board = board
        self._directory = directory
        self._running: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, path: str) -> ServedModel:
        """Load an adapter, and return once every engine that takes requests has it. FieldError if
        it cannot be loaded; ApiError if engines or the board do not answer in time."""
        return await self._to_its_end(self._load(name, path))

    async def unload(self, name: str) -> None:
        """Offer an adapter no more; requests that have it run to their end. ApiError if there is
        none of that name; FieldError for one that stays as long as the application."""
        await self._to_its_end(self._unload(name))

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._on_end)
        return await asyncio.shield(task)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have left

    async def _load(self, name: str, path: str) -> ServedModel:
        if self._models.by_name.get(name) is not None:
            raise FieldError("lora_name", "a name that is free", name)
        directory = Path(path)
        if not directory.is_absolute():
            raise FieldError("lora_path", "an absolute path, the same on all nodes", path)
        content = await asyncio.to_thread(_checked, directory, self._max_rank)
        try:
            adapters = await self._board.load_adapter(
                LoadCall(self._numerics_hash, name, path, content, self._max_loaded)
            )
        except BoardSilent as error:
            raise _silent(error) from error
        self._models.see(adapters)
        adapter = adapters.named(name)
        assert adapter is not None, "it was added"
        try:
            return await self._until_loaded(adapter)
        except BaseException:
            if self._found(adapter) is not None:
                with suppress(BoardSilent):
                    await self._leave(name)
            raise

    async def _until_loaded(self, adapter: LoraAdapter) -> ServedModel:
        directory = self._directory
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                while True:
                    if error := directory.adapter_error(adapter.id):
                        wanted = "an adapter that every engine can load"
                        raise FieldError("lora_path", wanted, Words(error))
                    if (found := self._found(adapter)) is None:
                        wanted = "one that stays while it is loaded"
                        raise FieldError("lora_name", wanted, Words("it unloaded"))
                    if not directory.lacking(adapter.id):
                        return found
                    await directory.change()
        except TimeoutError:
            lacking = ", ".join(directory.lacking(adapter.id))
            message = f"lora_path: wanted it loaded within {LOAD_TIMEOUT_S:g} s, found it missing"
            raise ApiError(
                503, f"{message} at {lacking}", param="lora_path", retry_after_s=RETRY_AFTER_S
            ) from None

    def _found(self, adapter: LoraAdapter) -> ServedModel | None:
        """Return the model that it is offered as; None if it is not any more."""
        found = self._models.by_name.get(adapter.name)
        return found if found is not None and found.adapter_id == adapter.id else None

    async def _unload(self, name: str) -> None:
        if self._models.is_fixed(name):
            wanted = "an adapter that was loaded while the application serves"
            what = "the model's" if self._models.is_alias(name) else "one of lora_modules"
            raise FieldError("lora_name", wanted, Words(f"{name!r}, {what}"))
        try:
            is_known = await self._leave(name)
        except BoardSilent as error:
            raise _silent(error) from error
        if not is_known:
            message = f"lora_name: wanted an adapter that is loaded, found {name!r}"
            raise ApiError(404, message, param="lora_name")

    async def _leave(self, name: str) -> bool:
        """Have the board let one leave; return whether it knows of one."""
        adapters = await self._board.unload_adapter(UnloadCall(self._numerics_hash, name))
        if adapters is not None:
            self._models.see(adapters)
        return adapters is not None


def _checked(directory: Path, max_rank: int) -> bytes:
    """Return the fingerprint of an adapter's files; FieldError if no engine could load it."""
    try:
        config = LoraConfig.from_dir(directory)
    except FieldError as error:
        wanted = "an adapter that Lockstep can serve"
        raise FieldError("lora_path", wanted, Words(str(error))) from None
    # Which modules there are is in the weights, which an engine reads.
    rank = max(config.r, *(config.rank_pattern or {}).values(), 0)
    if rank > max_rank:
        wanted = f"an adapter of rank at most {max_rank} (max_lora_rank)"
        raise FieldError("lora_path", wanted, Words(f"one of rank {rank}"))
    try:
        return fingerprint(directory)
    except OSError as error:
        found = Words(f"{directory}: {error.strerror}")
        raise FieldError("lora_path", "files that can be read", found) from None


def _silent(error: BoardSilent) -> ApiError:
    message = f"status board: wanted an answer, found {error}"
    return ApiError(503, message, retry_after_s=RETRY_AFTER_S)
