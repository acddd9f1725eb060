"""What `house_figures.py` runs: trace one streamed chat answer of four tokens, engine in process.

    python examples/bench/house_stations.py --root DIR --mode eager|piecewise|full

The HTTP application of the ingress is called without a socket, over an engine of this process in
place of pools and Ray. One answer is served first, so that what is loaded at first use does not
count. The last line printed is JSON: by part of the answer its calls, functions, files and hops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.wire.messages import EngineOutput, GenerateRequest, Submit
from serve.admission import Admission
from serve.config import ApiSettings
from serve.llm import LLM
from serve.openai.app import build_app
from serve.openai.generation import Serving
from serve.requests.records import SequenceRecord

NUM_TOKENS = 4
PACKAGES = ("serve", "cluster", "model", "compile")
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
GRAPHS = {"piecewise": "PIECEWISE", "full": "FULL_DECODE_ONLY"}
Call = tuple[str, str]
"""The file and the qualified name of a function that was called."""


class EngineBackend:
    """An engine of this process in the place of the ingress's router.

    The engine steps while any request runs, and lets the event loop go on after each step.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._outputs: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._steps: asyncio.Task[None] | None = None

    def is_ready(self) -> bool:
        return True

    def failure(self) -> str:
        return ""

    async def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncIterator[EngineOutput]:
        """Yield a request's outputs up to its last one."""
        queue = self._outputs[request.request_id] = asyncio.Queue()
        self._engine.submit(Submit(request, None))
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step())
        try:
            is_running = True
            while is_running:
                output = await queue.get()
                is_running = not output.finish_reason
                yield output
        finally:
            del self._outputs[request.request_id]
            self._engine.abort([request.request_id])

    async def _step(self) -> None:
        while self._engine.has_unfinished:
            for output in self._engine.step():
                if output.request_id in self._outputs:
                    self._outputs[output.request_id].put_nowait(output)
            await asyncio.sleep(0)


class Calls:
    """Records the calls of the packages' functions, on all threads, while it is entered."""

    def __init__(self, root: Path) -> None:
        self._prefixes = tuple(f"{root / name}{os.sep}" for name in PACKAGES)
        self._start = len(f"{root}{os.sep}")
        self.made: list[Call] = []

    def __enter__(self) -> Calls:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._prefixes):
            self.made.append((code.co_filename[self._start :], code.co_qualname))


def counts(calls: list[Call]) -> dict[str, int]:
    """Return the counts of a part; comprehensions and lambdas are no calls of their own."""
    files = [file for file, _ in calls]
    named = [call for call in calls if not call[1].endswith(COMPREHENSIONS)]
    return {
        "calls": len(named),
        "functions": len(set(named)),
        "files": len(set(files)),
        "hops": sum(one != other for one, other in pairwise(files)),
    }


def parts(calls: list[Call]) -> dict[str, dict[str, int]]:
    """Return the counts of the answer and of its parts: the second step is a decode step."""
    names = [name for _, name in calls]
    added = names.index("Scheduler.add")
    steps = [index for index, name in enumerate(names) if name == "Engine.step"]
    begin, following = steps[1], steps[2]
    end = next(i for i in range(begin, following) if calls[i][0].startswith("serve"))
    return {
        "answer": counts(calls),
        "HTTP to Scheduler.add": counts(calls[:added]),
        "decode step": counts(calls[begin:end]),
        "token out": counts(calls[end:following]),
    }


def application(mode: str) -> Any:
    """Return the ingress's HTTP application over an engine of the bundled model."""
    compilation: Any = 0
    if mode in GRAPHS:
        compilation = {
            "level": 3,
            "use_inductor": False,
            "cudagraph_mode": GRAPHS[mode],
            "cudagraph_capture_sizes": [1, 2, 4],
            "capture_num_tokens": [8, 16],
        }
    llm = LLM(
        None,
        dtype="float32",
        device="cpu",
        max_model_len=512,
        kv_memory="64MiB",
        threads_per_rank=1,
        compilation=compilation,
    )
    admission = Admission(
        max_running=64,
        max_queued=0,
        max_queue_wait_s=60.0,
        max_body_bytes=8 << 20,
        retry_after_s=3.0,
    )
    settings = ApiSettings(served_model_name="tiny", max_model_len=512)
    backend: Any = EngineBackend(llm.engine)  # of the ingress's backend only what a chat needs
    return build_app(Serving(settings, backend, lambda: llm.tokenizer, admission))


async def ask(app: Any) -> bytes:
    """Ask for a streamed chat answer, and return its body."""
    question = {
        "model": "tiny",
        "temperature": 0,
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    }
    body = json.dumps(question).encode()
    left = [{"type": "http.request", "body": body, "more_body": False}]
    received = bytearray()

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()  # the client stays
        return left.pop()

    async def send(message: dict[str, Any]) -> None:
        received.extend(message.get("body", b""))

    headers = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    return bytes(received)


async def trace(app: Any, root: Path) -> list[Call]:
    """Return the calls of the second answer."""
    await ask(app)
    await asyncio.sleep(0)  # what its end has cancelled
    with Calls(root) as calls:
        body = await ask(app)
    if not body.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"answer: wanted a whole stream, found {body[:500]!r}")
    return calls.made


def main() -> None:
    """Trace one mode, and print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the checkout that is imported")
    parser.add_argument("--mode", choices=("eager", *GRAPHS), required=True)
    arguments = parser.parse_args()
    calls = asyncio.run(trace(application(arguments.mode), arguments.root.resolve()))
    print(json.dumps(parts(calls)), flush=True)
    os._exit(0)  # the engine's threads need no end


if __name__ == "__main__":
    main()
