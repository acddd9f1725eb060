"""A backend that plays a script, and the app over it: in process, and on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.observe.counts import Counts, Ledger
from cluster.observe.metrics import INGRESS, MetricsSnapshot
from cluster.wire.messages import EngineOutput, GenerateRequest, Submit, TokenLogprobs
from serve.admission import Admission
from serve.arguments import DeployArgs
from serve.config import ApiSettings
from serve.llm import LLM
from serve.openai.app import build_app
from serve.openai.generation import Serving
from serve.requests.records import SequenceRecord
from serve.requests.tokenizer import Tokenizer

MODEL = "scripted"
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the cat sat on the mat and the dog ran over the hill", "hello world, hello again"] * 8


class ScriptedBackend:
    """Answers every request with the same pieces of token ids.

    `hangs` waits forever where the script ends; `closed` counts the streams that were closed.
    """

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.finish_reason = "stop"
        self.stop_token_id = -1
        self.error = ""
        self.raises: Exception | None = None
        self.pause_s = 0.0
        self.hangs = False
        self.num_cached_tokens = 0
        self.ready = True
        self.is_healthy = True
        self.requests: list[GenerateRequest] = []
        self.ledger = Ledger()
        self.num_open = 0
        self.closed_at: list[float] = []

    def writes(
        self,
        tokenizer: Tokenizer,
        text: str,
        *,
        rng: random.Random | None = None,
        finish_reason: str = "stop",
    ) -> None:
        """Say a text, token by token or in random groups of tokens, and an end token to stop."""
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        eos, is_stop = tokenizer.eos_token_ids[0], finish_reason == "stop"
        token_ids += [eos] * is_stop
        self.finish_reason, self.stop_token_id = finish_reason, eos if is_stop else -1
        pieces = []
        while token_ids:
            size = rng.randrange(1, 6) if rng is not None else 1
            pieces.append(token_ids[:size])
            token_ids = token_ids[size:]
        self.pieces = pieces or [[]]

    def is_ready(self) -> bool:
        return self.ready

    def failure(self) -> str:
        return "" if self.is_healthy else "decode pool: rank dp=0 tp=1 epoch=0: stuck"

    async def status(self) -> tuple[int, dict[str, Any]]:
        return (200, {"status": "ready"}) if self.ready else (503, {"status": "loading"})

    async def metrics(self, counts: Counts) -> MetricsSnapshot:
        self.ledger.add("this", INGRESS, counts)
        return MetricsSnapshot(self.ledger.totals, {})

    async def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        record.on_attempt()
        self.requests.append(request)
        self.num_open += 1
        try:
            async for output in self._play(request):
                yield output
        finally:
            self.num_open -= 1
            self.closed_at.append(time.monotonic())

    async def _play(self, request: GenerateRequest) -> AsyncIterator[EngineOutput]:
        for i, token_ids in enumerate(self.pieces):
            is_last = i == len(self.pieces) - 1 and not self.hangs and self.raises is None
            output = self._output(request, token_ids, is_last)
            asked = request.sampling.num_prompt_logprobs
            if i == 0 and asked >= 0:
                found = [_logprobs(token_id, asked) for token_id in request.prompt_token_ids[1:]]
                output = msgspec.structs.replace(output, prompt_logprobs=found)
            yield output
            await asyncio.sleep(self.pause_s)
        if self.raises is not None:
            raise self.raises
        if self.hangs:
            await asyncio.Event().wait()

    def _output(
        self, request: GenerateRequest, token_ids: list[int], is_last: bool
    ) -> EngineOutput:
        num_logprobs = request.sampling.num_logprobs
        return EngineOutput(
            request_id=request.request_id,
            position=0,
            token_ids=token_ids,
            logprobs=[_logprobs(t, num_logprobs) for t in token_ids if num_logprobs >= 0],
            finish_reason=self.finish_reason if is_last else "",
            stop_token_id=self.stop_token_id if is_last else -1,
            num_cached_tokens=self.num_cached_tokens,
            handoff=None,
            error=self.error if is_last else "",
            prompt_logprobs=[],
            queued_us=0,
        )


class EngineBackend(ScriptedBackend):
    """An engine that steps between the requests' events, in place of a script."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine
        self._waiting: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._pump: asyncio.Task[None] | None = None

    async def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        self.requests.append(request)
        queue = self._waiting[request.request_id] = asyncio.Queue()
        self._engine.submit(Submit(request, None))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step())
        try:
            is_running = True
            while is_running:
                output = await queue.get()
                is_running = not output.finish_reason
                yield output
        finally:
            del self._waiting[request.request_id]
            self._engine.abort([request.request_id])

    async def _step(self) -> None:
        while self._engine.has_unfinished:
            for output in self._engine.step():
                if output.request_id in self._waiting:
                    self._waiting[output.request_id].put_nowait(output)
            await asyncio.sleep(0)


def _logprobs(token_id: int, num_logprobs: int) -> TokenLogprobs:
    top = [token_id + i for i in range(num_logprobs)]
    values = [-0.5 - i for i in range(num_logprobs)]
    return TokenLogprobs(logprob=-0.5, rank=1, top_token_ids=top, top_logprobs=values)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with a ChatML template, as a checkpoint's directory."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("checkpoint")
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_dir(checkpoint)


@pytest.fixture
def with_template(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a checkpoint with another chat template, or several: `with_template(text, ...)`."""

    def make(template: str, **named: str) -> Path:
        (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
        config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "chat_template.jinja").write_text(template)
        for name, text in named.items():
            folder = tmp_path / "additional_chat_templates"
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.jinja").write_text(text)
        return tmp_path

    return make


@pytest.fixture
def backend(tokenizer: Tokenizer) -> ScriptedBackend:
    """Says «hello world» token by token, then the end token."""
    scripted = ScriptedBackend()
    scripted.writes(tokenizer, "hello world")
    return scripted


@pytest.fixture(scope="session")
def llm(tiny_checkpoint: Path) -> LLM:
    """A model in process. One thread: two on shared cores wait for each other everywhere."""
    return LLM(
        tiny_checkpoint,
        dtype="float32",
        device="cpu",
        max_model_len=512,
        kv_memory="64MiB",
        threads_per_rank=1,
    )


@pytest.fixture
def backend_of() -> type[EngineBackend]:
    """The class of what runs an engine in process."""
    return EngineBackend


@pytest.fixture
def engine_backend(llm: LLM) -> Iterator[EngineBackend]:
    yield EngineBackend(llm.engine)
    assert not llm.engine.has_unfinished


@pytest.fixture
def engine_app(llm: LLM, engine_backend: EngineBackend, admission: Admission) -> Starlette:
    """The app over a model in process."""
    settings = ApiSettings(served_model_name="tiny", max_model_len=llm.config.max_model_len)
    return build_app(Serving(settings, engine_backend, lambda: llm.tokenizer, admission))


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(
        served_model_name=MODEL,
        max_model_len=256,
        args=DeployArgs(max_body_bytes=20_000),
        retry_after_s=3,
    )


@pytest.fixture
def admission() -> Admission:
    """One with room for whatever a test does not limit."""
    return Admission(
        max_running=2048,
        max_queued=0,
        max_queue_wait_s=60.0,
        max_body_bytes=8 << 20,
        retry_after_s=3.0,
    )


@pytest.fixture
def serving(
    settings: ApiSettings, backend: ScriptedBackend, tokenizer: Tokenizer, admission: Admission
) -> Serving:
    return Serving(settings, backend, lambda: tokenizer, admission)


@pytest.fixture
def app(serving: Serving) -> Starlette:
    return build_app(serving)


Call = Callable[..., httpx.Response]


async def ask(app: Starlette, method: str, path: str, **kwargs: Any) -> httpx.Response:
    """Send one request to an app in process."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **kwargs)


def send(app: Starlette, method: str, path: str, **kwargs: Any) -> httpx.Response:
    return asyncio.run(ask(app, method, path, **kwargs))


@pytest.fixture
def send_to() -> Call:
    """Send one request to any app: `send_to(app, "POST", ...)`."""
    return send


@pytest.fixture
def call(app: Starlette) -> Call:
    """Send one request to the app: `call("POST", "/v1/completions", json={...})`."""
    return lambda method, path, **kwargs: send(app, method, path, **kwargs)


@pytest.fixture
def app_with(
    backend: ScriptedBackend, tokenizer: Tokenizer, admission: Admission
) -> Callable[..., Starlette]:
    """Return an app with these settings: `app_with({"max_model_len": 9, ...})`."""

    def make(limits: dict[str, Any]) -> Starlette:
        own = {"served_model_name": "m", "max_model_len": 256}
        own |= {name: limits[name] for name in ApiSettings.__struct_fields__ if name in limits}
        args = DeployArgs(**{name: limits[name] for name in limits.keys() - own.keys()})
        settings = ApiSettings(**own, args=args)
        return build_app(Serving(settings, backend, lambda: tokenizer, admission))

    return make


@pytest.fixture
def call_with(app_with: Callable[..., Starlette]) -> Call:
    """Send one request to an app with these settings: `call_with({...}, "POST", ...)`."""
    return lambda limits, method, path, **kwargs: send(app_with(limits), method, path, **kwargs)


class Chats:
    """Chats with an app over the tokenizer in a directory, whose backend writes any text.

    `oracle` is transformers' tokenizer of it.
    """

    def __init__(
        self, path: Path, backend: ScriptedBackend, admission: Admission, **options: Any
    ) -> None:
        self.oracle = AutoTokenizer.from_pretrained(path)
        self.tokenizer = Tokenizer.from_dir(path)
        self.backend = backend
        self.settings = ApiSettings(
            served_model_name="m", max_model_len=100_000, args=DeployArgs(**options)
        )
        self.app = build_app(Serving(self.settings, backend, lambda: self.tokenizer, admission))
        self.runner = asyncio.Runner()

    def writes(
        self, text: str, *, rng: random.Random | None = None, finish_reason: str = "stop"
    ) -> None:
        """Let the model write a text, token by token or in random groups of tokens."""
        self.backend.writes(self.tokenizer, text, rng=rng, finish_reason=finish_reason)

    def post(self, **body: Any) -> httpx.Response:
        asked = {"messages": HI, **body}
        return self.runner.run(ask(self.app, "POST", "/v1/chat/completions", json=asked))

    def choice(self, **body: Any) -> dict[str, Any]:
        """Return the choice that is answered, or the one that a stream's deltas make up."""
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            return joined(answer.text)
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def prompt_ids(self, **body: Any) -> list[int]:
        answer = self.post(return_token_ids=True, **body)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["prompt_token_ids"]
        return token_ids


@pytest.fixture(name="joined")
def joined_of() -> Callable[[str], dict[str, Any]]:
    return joined


def joined(stream: str) -> dict[str, Any]:
    """Return the choice that the deltas of a stream make up, as a client joins them."""
    *events, done = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert done == "[DONE]"
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    found: dict[str, Any] = {"message": message, "finish_reason": None}
    for event in events:
        [choice] = json.loads(event)["choices"]
        assert found["finish_reason"] is None
        found["finish_reason"] = choice["finish_reason"]
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(message["tool_calls"]), "function")
                function = {"name": call["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"id": call["id"], "function": function})
            assert call["index"] == len(message["tool_calls"]) - 1
            assert "id" in call or call["function"]["arguments"]
            message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return found


@pytest.fixture
def chats(backend: ScriptedBackend, admission: Admission) -> Iterator[Callable[..., Chats]]:
    """Chats over a checkpoint, with arguments of `deploy`: `chats(path, tool_call_parser=...)`."""
    made: list[Chats] = []

    def make(path: Path, **options: Any) -> Chats:
        made.append(Chats(path, backend, admission, **options))
        return made[-1]

    yield make
    for each in made:
        each.runner.close()


class Connection:
    """An ASGI server's side of one POST.

    `parts` of its body come, or errors, and then nothing until its client `leaves`, which reads
    while `reads` is set. `messages` were sent at `times`, each in `send_s`.
    """

    def __init__(
        self, body: dict[str, Any] | bytes, path: str = "/v1/completions", *, send_s: float = 0.0
    ) -> None:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        part = {"type": "http.request", "body": content, "more_body": False}
        self.parts: list[Any] = [part]
        self.leaves, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.messages: list[dict[str, Any]] = []
        self.times: list[float] = []
        self._send_s = send_s
        self._headers = [(b"host", b"localhost")]
        self._path = path

    async def __call__(self, app: Any) -> None:
        scope = {"type": "http", "method": "POST", "path": self._path, "query_string": b""}
        scope |= {"raw_path": self._path.encode(), "root_path": "", "headers": self._headers}
        await app(scope, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        if not self.parts:
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        part = self.parts.pop(0)
        if isinstance(part, type):
            raise part
        return dict(part)

    async def send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.messages.append(message)
        self.times.append(time.monotonic())
        await asyncio.sleep(self._send_s)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


@pytest.fixture
def connect() -> type[Connection]:
    """A connection whose ends a test holds: `await connect(body)(app)`."""
    return Connection


@pytest.fixture
def url(app: Starlette) -> Iterator[str]:
    """The app on a free loopback port; gives its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not running.started:
        assert time.monotonic() < deadline, "uvicorn did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(timeout=60)
    with contextlib.suppress(OSError):
        listener.close()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
