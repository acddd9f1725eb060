"""Compiling in another process while a rank serves: the process, and the rank's end of it.

    python -m cluster.rank.compile_process        started by a rank, never by hand

1. The process builds the rank's model without values and compiles its pieces into the cache, under
   the key and in the directory of the rank. A lock lies on each piece that is being compiled, so
   processes of other ranks do no work twice. Those on other nodes do not either: the process claims
   each piece through its rank. It gets a `CompileJob` on its standard input, and then what it has
   claimed, in lines of base64. It reports progress, claims and what it publishes on its standard
   output in lines of JSON, and ends with its rank: then its input ends.
2. When it has ended, the rank's step thread loads one piece between two steps: all of them at once
   would hold its streams up.
3. Then the rank's `CompileSwitch` knows, and its next vote says so.

If compiling is ended from outside, the rank says why and goes on as it is. If the model cannot be
compiled, the rank ends, and the group's owner ends the start.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cluster.config import EngineConfig
from cluster.engine.compile_switch import CannotCompile
from cluster.group.context import Progress, RankContext, RankPlace
from cluster.group.membership import GroupMembership
from cluster.observe.logs import configure_logs
from cluster.rank.compiling import as_final, graph_pools, one_line, rank_scope
from cluster.rank.forward import StepForward
from cluster.rank.inputs import StepInputs
from compile.counters import cache_misses, counter
from compile.scope import ArtifactExchange, compile_scope
from model.adapters import load_adapters
from model.parallel import Shard
from model.weights import blank_model

log = logging.getLogger("lockstep.compile")

NICENESS = 5
"""Of the process: with much less, ranks that are always busy would hardly ever be compiled for."""
CLOSE_S = 2.0
"""For the process to end; what it has started may hold its output open for longer."""


@dataclass(frozen=True)
class CompileJob:
    """For which rank to compile. Plain data: the groups of a shard stay in the rank's process."""

    config: EngineConfig
    place: RankPlace
    """Its dp_rank names the directory in the cache, also where ranks are independent."""
    tp: tuple[int, int]
    dp: tuple[int, int]
    shares_experts: bool
    threads: int

    @classmethod
    def of(cls, context: RankContext, group: GroupMembership) -> CompileJob:
        shard = group.shard
        tp, dp = (shard.rank, shard.size), (group.dp_rank, group.dp_size)
        shares_experts = shard.data is not None
        return cls(context.config, context.place, tp, dp, shares_experts, context.threads)

    def group(self) -> GroupMembership:
        """Return the rank's membership, with groups that nothing can be sent through."""
        dp_rank, dp_size = self.dp
        data = _shard(dp_rank, dp_size, "dp") if self.shares_experts else None
        shard = _shard(*self.tp, "tp", data)
        return GroupMembership(None, shard, dp_rank=dp_rank, dp_size=dp_size)


def _shard(rank: int, size: int, kind: str, data: Shard | None = None) -> Shard:
    group = dist.ProcessGroup(HashStore(), rank, size) if size > 1 else None
    return Shard(rank, size, group, kind=kind, data=data)


class CompileProcess:
    """A rank's end: starts the process, follows its progress, and ends it. Once `has_ended`,
    `error` says why nothing was compiled, or is empty; `is_final` if every other try would end
    so."""

    def __init__(
        self,
        job: CompileJob,
        on_end: Callable[[], None],
        exchange: ArtifactExchange | None = None,
    ) -> None:
        """`on_end` is called on a thread of its own when compiling has ended; `exchange` is used on
        that thread."""
        self.done, self.total = 0, 1
        self.built: dict[str, int] = {}
        """What the process has compiled, by the names of `ModelRunner.debug`, once it has ended."""
        self.has_ended = False
        self.error = ""
        self.is_final = False
        self._on_end = on_end
        self._exchange = exchange
        self._claimed: set[str] = set()
        """What it compiles: nobody else may wait for it in vain."""
        self._is_closing = False
        # What Ray put on this process's path, the other one needs as well.
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.rank.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._thread = threading.Thread(target=self._follow, args=(job,), daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._is_closing = True
        self._process.kill()
        self._thread.join(CLOSE_S)

    def _follow(self, job: CompileJob) -> None:
        process, reported = self._process, ""
        assert process.stdin is not None and process.stdout is not None
        try:
            # It stays open: its end tells the process that the rank is gone.
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
            for line in process.stdout:
                reported = self._take(json.loads(line)) or reported
        except (OSError, ValueError) as error:
            reported = str(error)
        code = process.wait()
        for key in [*self._claimed]:
            self._publish(key, None)
        process.stdout.close()
        with suppress(OSError):  # of a job that was not taken
            process.stdin.close()
        if code:
            self.error = reported or _end_of(code)
        self.has_ended = True
        if not self._is_closing:
            self._on_end()

    def _take(self, reported: dict[str, Any]) -> str:
        if "error" in reported:
            self.is_final = bool(reported["is_final"])
            return str(reported["error"])
        if "misses" in reported:
            cache_misses.update(reported["misses"])
            self.built = reported["built"]
        elif "claim" in reported:
            assert self._process.stdin is not None
            self._process.stdin.write(self._answer(reported["claim"]))
            self._process.stdin.flush()
        elif "publish" in reported:
            data = reported["data"]
            self._publish(reported["publish"], None if data is None else base64.b64decode(data))
        else:
            self.done, self.total = reported["done"], reported["total"]
        return ""

    def _answer(self, key: str) -> bytes:
        """Return the line that answers a claim; it is empty if the process is to compile."""
        data = None if self._exchange is None else self._exchange.claim(key)
        if data is None:
            self._claimed.add(key)
        return base64.b64encode(data or b"") + b"\n"

    def _publish(self, key: str, data: bytes | None) -> None:
        self._claimed.discard(key)
        if self._exchange is not None:
            self._exchange.publish(key, data)


def _end_of(code: int) -> str:
    if code > 0:
        return f"the process that compiles ended with code {code}"
    return f"the process that compiles was ended by {signal.Signals(-code).name}"


class CompileAhead:
    """What a rank does about its compiled pieces while it serves without them. Everything but
    `progress`, `error` and `close` belongs to the step thread."""

    def __init__(
        self,
        job: CompileJob,
        forward: StepForward,
        wake: Callable[[], None],
        exchange: ArtifactExchange | None,
    ) -> None:
        """`wake` wakes the step thread, and is called on any thread, as `exchange` is."""
        self.error = ""
        self._num_threads = job.threads
        self._forward = forward
        self._wake = wake
        self._loading: Iterator[None] | None = None
        self._process = CompileProcess(job, wake, exchange)
        log.warning(
            "serving without compiled pieces, of which the cache lacks some; process %d compiles "
            "them",
            self._process.pid,
        )

    @property
    def built(self) -> dict[str, int]:
        return self._process.built

    @property
    def progress(self) -> tuple[str, int, int] | None:
        """What is being done, how much of it is done and of how much; None when all is."""
        switch = self._forward.switch
        if self.error or switch.is_over:
            return None
        if switch.stage:
            return "capturing graphs", switch.stage - 1, switch.last_stage - 1
        return "compiling", self._process.done, self._process.total

    def load_piece(self) -> None:
        """Load the next piece, if there is one. Call it between steps. `CannotCompile`: there is
        nothing to load, and no other start would have it."""
        if self.error or self._forward.switch.is_loaded:
            return
        is_compiling = not self._process.has_ended
        # A step whose threads wait for one that the compiler has displaced takes a hundred times
        # as long.
        if torch.get_num_threads() != (wanted := max(1, self._num_threads - is_compiling)):
            torch.set_num_threads(wanted)
        if is_compiling:
            return
        if self._process.is_final:
            raise CannotCompile(self._process.error)
        if self._process.error:
            self._give_up(self._process.error)
            return
        if self._loading is None:
            self._loading = self._forward.loading()
        with torch.inference_mode():
            has_more = next(self._loading, self) is not self
        if not has_more and self._forward.is_loaded:
            self._forward.switch.is_loaded = True
        elif not has_more:
            self._give_up("what was compiled cannot be loaded")
        self._wake()

    def close(self) -> None:
        self._process.close()

    def _give_up(self, error: str) -> None:
        self.error = error
        log.warning("serving without compiled pieces until the next start: %s", error)


# --- in the process ------------------------------------------------------------------------------


def main() -> int:
    os.nice(NICENESS)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    job: CompileJob = pickle.load(sys.stdin.buffer)
    configure_logs(job.config.log_format)
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_end_with_the_rank, args=(answers,), daemon=True).start()
    # What libraries print must not be taken for progress.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(**reported: object) -> None:
        print(json.dumps(reported), file=out, flush=True)

    try:
        exchange = RankExchange(report, answers)
        compile_for(job, lambda _, done, total: report(done=done, total=total), exchange)
    except Exception as error:
        log.exception("compiling for a rank that serves")
        report(error=one_line(error), is_final=as_final(error) is not None)
        return 1
    finally:
        compilations, cpp_builds = counter.num_backend_compilations, counter.num_cpp_builds
        built = {"compilations": compilations, "cpp_builds": cpp_builds}
        report(misses=cache_misses, built=built)
    return 0


class RankExchange:
    """The rank's `ArtifactExchange`, for the process."""

    def __init__(self, report: Callable[..., None], answers: queue.SimpleQueue[bytes]) -> None:
        self._report = report
        self._answers = answers

    def claim(self, key: str) -> bytes | None:
        self._report(claim=key)
        return base64.b64decode(self._answers.get()) or None

    def publish(self, key: str, data: bytes | None) -> None:
        self._report(publish=key, data=None if data is None else base64.b64encode(data).decode())


def _end_with_the_rank(answers: queue.SimpleQueue[bytes]) -> None:
    """Hand on what the rank answers until it ends."""
    rest = b""
    # Not by sys.stdin, whose lock the end of the process would wait for.
    while data := os.read(0, 1 << 20):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            answers.put(line)
    os._exit(1)


def compile_for(job: CompileJob, progress: Progress, exchange: ArtifactExchange) -> None:
    config, group = job.config, job.group()
    torch.set_num_threads(job.threads)  # part of the cache's key
    context = RankContext(config, job.place, progress=progress, exchange=exchange)
    device = torch.device(context.device.name)
    pools = graph_pools(config.compilation, device)
    scope = rank_scope(context, group, pools)
    dtype = getattr(torch, config.dtype)
    with compile_scope(scope):
        path, held = Path(config.model_path), config.quantization
        model, model_config = blank_model(path, shard=group.shard, dtype=dtype, quantization=held)
        load_adapters(model, config.lora_paths, config.num_lora_slots, config.max_lora_rank)
    forward = StepForward(
        model,
        StepInputs(config, model_config.vocab_size, device),
        scope.config,
        group=group,
        pools=pools,
    )
    forward.prepare(config.scheduler.max_num_batched_tokens)


if __name__ == "__main__":
    sys.exit(main())
