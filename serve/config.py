"""The arguments of `deploy` and of `LLM`: strict, and resolved into engine configurations.

Arguments come as text (`serve run serve.app:deploy max_num_seqs=8 prefill.replicas=2`) or typed
and nested (YAML), and `config=FILE` adds those of a file. Every error is one line,
`FIELD: wanted ..., found ...`, and is raised before anything is started.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cluster.config import (
    DEFAULT_NUM_CPUS,
    CacheConfig,
    ConfigError,
    EngineConfig,
    ParallelConfig,
    Role,
    SchedulerConfig,
    TransferConfig,
)
from cluster.engine.blocks import check_num_blocks
from cluster.logs import FORMATS
from cluster.messages import PROTOCOL_VERSION
from model.config import ModelConfig, fingerprint
from model.fields import ModelError
from serve.compilation import (
    as_object,
    check_warmups,
    given_fields,
    refuse_speculation,
    resolved,
    shared_facts,
)
from serve.config_file import read_file
from serve.keys import check_keys, read_keys
from serve.openai.reasoning import ReasoningFormat
from serve.openai.tool_parser import ToolFormat
from serve.routing import Routing
from serve.tracing import check_endpoint

BUNDLED_NAME = "lockstep-tiny"
TOOL_CALL_PARSERS = ("auto", *(known.value for known in ToolFormat))
REASONING_PARSERS = tuple(known.value for known in ReasoningFormat)
BATCHED_TOKENS_BY_DEVICE = {"cuda": 2048, "cpu": 512}
"""A GPU's longer steps compute more tokens a second. A CPU's do not, while the first token of every
prompt in them, and the next one of every stream, waits for their end."""
MAX_INGRESSES = 64
"""Engines send to 128 addresses, and while a deployment is replaced both have theirs."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all argument structs: an unknown key is an error."""


class PoolArgs(_Strict, frozen=True):
    """`prefill.*`, `decode.*` and `mixed.*`."""

    replicas: int = 1
    """Rank groups in the pool."""
    tensor_parallel_size: int = 1
    """Ranks that hold the model together: a number that its heads allow, the same in both pools."""
    data_parallel_size: int = 1
    """Engines in a rank group, each with its own KV, that run every step together."""
    routing: str = Routing.LEAST_REQUESTS.value
    """Which engine of a group gets a request: `round_robin`, `least_requests` or `least_tokens`."""
    num_cpus: float = DEFAULT_NUM_CPUS
    """CPUs that each rank reserves in Ray. The default is next to nothing, so that it starts on any
    machine."""


class IngressArgs(_Strict, frozen=True):
    """`ingress.*`."""

    replicas: int = 1
    """Processes that take requests and send tokens; as many as sequences decode at once, and at
    most 64. What may run and wait is divided among them, and so bounds the sequences of one
    request."""


class KVArgs(_Strict, frozen=True):
    """`kv.*`."""

    transport: str = "auto"
    """`shm` (shared memory, not on GPUs) or `tcp`; `auto`: shared memory within a node where it can
    be opened, else TCP."""
    lease_s: float = 30.0
    """How long a prefill rank holds KV without hearing from its reader; 0.01 to 86400."""


class DeployArgs(_Strict, frozen=True):
    """Every argument with its default; None means: taken from the model or the machine."""

    model: str | None = None
    """A directory with `config.json`, safetensors and tokenizer (Llama, Mistral, Mixtral, Qwen2,
    Qwen3, Qwen3-MoE); null: the bundled model."""
    served_model_name: str | list[str] | None = None
    """What requests call the model; of several names, in a list or separated by commas, the first
    is reported. Null: the last part of its path."""
    device: str = "auto"
    """`cpu` or `cuda`; `auto` is what the machine that deploys has, and is refused where that one
    has no GPU and others do."""
    dtype: str = "auto"
    """`float32`, `bfloat16` or `float16`, of weights, activations and KV; `auto`: the
    checkpoint's."""
    max_model_len: int | None = None
    """Prompt and output tokens of one request, with rotary scaling up to the scaled context; null:
    the model's."""
    max_num_seqs: int = 64
    """Sequences that run at once in one engine."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step, at least `max_num_seqs`; longer prompts are computed in chunks. Null:
    2048 on a GPU, 512 on a CPU, which computes no faster in longer steps."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_kv_blocks: int | None = None
    """KV blocks of one rank; null: as many as its memory for KV holds."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and KV; above 0, at most 1."""
    kv_memory: int | str = "1GiB"
    """Memory for KV on a CPU: bytes, or text such as `512MiB` or `2GB`."""
    threads_per_rank: int | None = None
    """Threads of one rank's tensor operations on a CPU; null: cores divided by ranks."""
    enable_prefix_caching: bool = True
    """Whether prompts that begin alike share KV."""
    pools: str = "pd"
    """`pd`: a prefill and a decode pool; `mixed`: one pool that does both."""
    prefill: PoolArgs = PoolArgs()
    """The prefill pool."""
    decode: PoolArgs = PoolArgs()
    """The decode pool."""
    mixed: PoolArgs = PoolArgs()
    """The mixed pool."""
    ingress: IngressArgs = IngressArgs()
    """What clients reach."""
    lockstep: str = "on"
    """`off`: data-parallel engines of a dense model step apart; those of a model with experts
    cannot."""
    overlap: str = "auto"
    """`on`: a step is planned while the device runs the one before; `off`: after it; `auto`: `on`
    with `device=cuda`. A CPU runs a step before its launch returns, so nothing is won there."""
    kv: KVArgs = KVArgs()
    """How KV travels from prefill to decode ranks."""
    enforce_eager: bool = False
    """Compile and capture nothing."""
    compilation: dict[str, Any] = {}
    """`compilation.*`, alias `cc.*`: fields of `CompilationConfig`, those that are given."""
    torch_compile_config: dict[str, Any] | UnsetType | None = UNSET
    """Compilation fields as TensorRT-LLM spells them; null: compilation is off."""
    cuda_graph_config: dict[str, Any] | UnsetType | None = UNSET
    """Graph fields as TensorRT-LLM spells them; null: decode steps replay no full graphs."""
    speculative_config: dict[str, Any] | None = None
    """Refused by name: speculation is not built yet."""
    max_queued_requests: int = 256
    """Sequences that wait beyond those that run; more get 429."""
    max_queue_wait_s: float = 60.0
    """How long sequences may have to wait, at the rate at which others have ended in the last 30 s;
    beyond that a request gets 429."""
    request_timeout_s: float = 600.0
    """For receiving a request, and again for answering it to the last byte."""
    drain_timeout_s: float = 30.0
    """How long what runs may take once `serve run` got SIGTERM; new requests get 503 meanwhile."""
    watchdog_s: float = 10.0
    """How long a rank may stay in one phase of a step before its group is rebuilt; or five times
    what the step should take, if that is longer."""
    max_body_bytes: int = 8 << 20
    """Bytes of one request's body; a larger one gets 413."""
    max_answer_bytes: int = 64 << 20
    """How large a streamed answer may become by what its request asks for, a whole one to a quarter
    of that. More gets 400, or fewer tokens where `max_tokens` was left out. At least 64 KiB."""
    stream_interval: int = 1
    """Tokens that a chunk of a stream has at least; its first and last tokens come at once. With
    more than four streams chunks hold what comes between two ticks of at most 0.1 s."""
    api_keys: str | list[str] = ""
    """Bearer keys of clients, separated by commas; empty: none are needed. Keys on a command line
    are seen in `ps`."""
    api_keys_file: str | None = None
    """A file with one key a line, read again when it changes."""
    open_paths: str | list[str] = "/,/page.css,/page.js,/status,/health,/ready,/version,/metrics"
    """Paths that need no key."""
    allowed_hosts: str | list[str] = ""
    """Without keys: names that requests may call this server by, beside addresses and private
    names; `*` allows all."""
    allowed_origins: str | list[str] = ""
    """Without keys: other servers whose pages may ask (CORS); `*` allows all."""
    log_format: str = "text"
    """Of the log: `text`, or `json` for an object a line."""
    log_requests: str = "on"
    """`on`: a line for each request, with its ids, tokens, times and engines, and nothing of
    prompts, answers or keys; `off`: none."""
    otlp_traces_endpoint: str | None = None
    """Where the ingress sends a trace of each request by OTLP, if the extra `tracing` is installed:
    `http://localhost:4317` (gRPC) or `http://localhost:4318/v1/traces` (HTTP, which has a path);
    null: nowhere. Sampling and the rest follow the environment's `OTEL_*`."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: `hermes` (also Qwen), `llama3_json` or `mistral`; `auto`: as
    its chat template writes them."""
    reasoning_parser: str = "none"
    """How a model that thinks writes its reasoning, which answers then have apart from the content:
    `deepseek_r1` (an answer begins with it) or `qwen3` (where it is opened by `<think>`)."""
    debug: bool = False
    """Serve `GET /debug/ranks` (what each rank compiled, captured and replayed, and its last 1,000
    agreements) and `GET /debug/ingress` (what it holds, how long tokens of streams wait for one
    another, and its event loop's longest pause)."""
    config: str | None = None
    """A YAML file of these arguments ([bundled.yaml](../examples/configs/bundled.yaml)); none may
    be given both in it and beside it. `LLM` takes the same file."""


@dataclass(frozen=True)
class AccessConfig:
    """Which requests an ingress accepts."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: Path | None = None
    """Read again when it changes."""
    open_paths: tuple[str, ...] = ()
    """What needs no key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may call this server by, where no key is needed."""
    allowed_origins: tuple[str, ...] = ()
    """Other servers whose pages may ask."""

    @property
    def needs_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys) or self.api_keys_file is not None


@dataclass(frozen=True)
class PoolConfig:
    """One pool: how many groups of which engine."""

    name: str
    """prefill, decode or mixed."""
    replicas: int
    num_cpus: float
    engine: EngineConfig
    routing: Routing = Routing.LEAST_REQUESTS
    """How requests are spread over the group's data-parallel ranks."""

    @property
    def max_running(self) -> int:
        """Sequences that run in it at once."""
        per_group = self.engine.scheduler.max_num_seqs * self.engine.parallel.data_parallel_size
        return self.replicas * per_group


@dataclass(frozen=True)
class DeployConfig:
    """Everything that a deployment is built from.

    Invariant: `pools` is (prefill, decode) or (mixed,); `config_hash` is equal in all processes
    that may talk to each other.
    """

    served_model_names: tuple[str, ...]
    """What requests may call the model; the first is what answers say."""
    model_path: str
    vocab_size: int
    """Token ids that the model knows, fewer or more than its tokenizer's."""
    max_prompt_len: int | None
    """The longest prompt whose KV the model can compute; None: any."""
    pools: tuple[PoolConfig, ...]
    config_hash: str
    access: AccessConfig
    max_queued_requests: int
    max_queue_wait_s: float
    request_timeout_s: float
    max_body_bytes: int
    max_answer_bytes: int
    drain_timeout_s: float = 30.0
    num_ingresses: int = 1
    stream_interval: int = 1
    log_format: str = "text"
    log_requests: bool = True
    otlp_traces_endpoint: str = ""
    """Empty: nothing is traced."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"
    debug: bool = False
    is_device_guessed: bool = False
    """`device` was auto, and was resolved on the machine that `deploy` ran on."""

    @property
    def served_model_name(self) -> str:
        """What answers call the model."""
        return self.served_model_names[0]

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens of one request together."""
        return self.pools[0].engine.max_model_len

    @property
    def cache_info(self) -> tuple[tuple[str, str], ...]:
        """What the metric `cache_config_info` tells of the KV cache."""
        engine = self.pools[0].engine
        return (
            ("block_size", str(engine.cache.block_size)),
            ("cache_dtype", engine.dtype),
            ("enable_prefix_caching", str(engine.cache.enable_prefix_caching)),
            ("gpu_memory_utilization", str(engine.cache.gpu_memory_utilization)),
        )

    @property
    def max_running(self) -> int:
        """Sequences that can decode at once."""
        return self.pools[-1].max_running

    @property
    def max_live(self) -> int:
        """Sequences that run or wait at once."""
        return self.max_running + self.max_queued_requests

    @property
    def ingress_share(self) -> tuple[int, int]:
        """How many sequences of one ingress may run and wait; those of all are never more than
        `max_live`."""
        running = self.max_running // self.num_ingresses
        return running, self.max_live // self.num_ingresses - running


def bundled_model() -> Path:
    """Return the tiny checkpoint that ships with Lockstep."""
    here = Path(__file__).resolve().parent
    for path in (here / "bundled" / "tiny", here.parent / "examples" / "tiny"):
        if (path / "config.json").is_file():
            return path
    raise ConfigError("model", "the bundled checkpoint in examples/tiny", None)


def deploy_config(raw: Mapping[str, Any]) -> DeployConfig:
    """Resolve the arguments of `deploy`.

    Raises:
        ConfigError: one line that names the argument, what is wanted and what was found.
    """
    args = parse_args(raw)
    if args.pools not in ("pd", "mixed"):
        raise ConfigError("pools", "pd or mixed", args.pools)
    names = ("prefill", "decode") if args.pools == "pd" else ("mixed",)
    _check_other_pools(args, names)
    num_ranks = sum(_num_ranks(name, getattr(args, name)) for name in names)
    roles = {"prefill": Role.PREFILL, "decode": Role.DECODE, "mixed": Role.MIXED}
    if args.pools == "pd":
        _check_equal_ranks(args.prefill, args.decode)
    pools = tuple(_pool_config(name, args, roles[name], num_ranks=num_ranks) for name in names)
    model_path = Path(pools[0].engine.model_path)
    model = ModelConfig.from_dir(model_path)
    return DeployConfig(
        served_model_names=_served_names(args),
        model_path=str(model_path),
        vocab_size=model.vocab_size,
        max_prompt_len=model.max_prompt_len,
        pools=pools,
        config_hash=_config_hash(pools[0].engine, args),
        access=_access(args),
        max_queued_requests=_at_least("max_queued_requests", args.max_queued_requests, 0),
        max_queue_wait_s=_at_least("max_queue_wait_s", args.max_queue_wait_s, 0.001),
        request_timeout_s=_at_least("request_timeout_s", args.request_timeout_s, 0.001),
        drain_timeout_s=_at_least("drain_timeout_s", args.drain_timeout_s, 0.0),
        max_body_bytes=_at_least("max_body_bytes", args.max_body_bytes, 1),
        max_answer_bytes=_at_least("max_answer_bytes", args.max_answer_bytes, 1 << 16),
        num_ingresses=_num_ingresses(args.ingress.replicas, pools[-1].max_running),
        stream_interval=_at_least("stream_interval", args.stream_interval, 1),
        log_format=args.log_format,
        log_requests=args.log_requests == "on",
        otlp_traces_endpoint=check_endpoint(args.otlp_traces_endpoint or ""),
        tool_call_parser=_one_of("tool_call_parser", args.tool_call_parser, TOOL_CALL_PARSERS),
        reasoning_parser=_one_of("reasoning_parser", args.reasoning_parser, REASONING_PARSERS),
        debug=args.debug,
        is_device_guessed=args.device == "auto",
    )


def engine_config(raw: Mapping[str, Any]) -> EngineConfig:
    """Resolve the same arguments for one engine in this process (`LLM`).

    Raises:
        ConfigError: as `deploy_config`.
    """
    args = parse_args(raw, pools="mixed")
    if args.pools != "mixed":
        raise ConfigError("pools", "mixed for an engine in process", args.pools)
    _check_other_pools(args, ("mixed",))
    for name in ("replicas", "tensor_parallel_size", "data_parallel_size"):
        if (size := getattr(args.mixed, name)) != 1:
            raise ConfigError(f"mixed.{name}", "1 for an engine in process", size)
    engine = _pool_config("mixed", args, Role.MIXED, num_ranks=1, is_served=False).engine
    if engine.compilation.serve_while_compiling == "on":
        field = "compilation.serve_while_compiling"
        raise ConfigError(field, "auto or off for an engine in process", "on")
    return engine


def parse_args(raw: Mapping[str, Any], **defaults: Any) -> DeployArgs:
    """Turn key=value text or typed nested values into `DeployArgs`.

    A text value that parses as a JSON list, object or null is taken as JSON; all other text is
    converted to the field's type.

    Args:
        raw: what is given, with `config` a file of more.
        defaults: what holds where neither says anything.
    """
    nested = {**defaults, **_nest(raw)}
    for name in ("lockstep", "overlap", "log_requests"):
        if isinstance(value := nested.get(name), bool):
            nested[name] = "on" if value else "off"  # as YAML reads these words
    try:
        args = msgspec.convert(nested, DeployArgs, strict=False)
    except msgspec.ValidationError as error:
        raise _config_error(str(error), nested) from None
    names = ("torch_compile_config", "cuda_graph_config")
    sections = {name: getattr(args, name) for name in names if getattr(args, name) is not UNSET}
    fields = given_fields(args.compilation, **sections)
    args = msgspec.structs.replace(args, compilation=fields)
    refuse_speculation(args.speculative_config or {})
    if args.lockstep not in ("on", "off"):
        raise ConfigError("lockstep", "on or off", args.lockstep)
    if args.overlap not in ("auto", "on", "off"):
        raise ConfigError("overlap", "auto, on or off", args.overlap)
    if args.log_format not in FORMATS:
        raise ConfigError("log_format", " or ".join(FORMATS), args.log_format)
    if args.log_requests not in ("on", "off"):
        raise ConfigError("log_requests", "on or off", args.log_requests)
    return args


def parse_bytes(field: str, value: int | str) -> int:
    """Return a number of bytes from a number or from text such as 512MiB or 2GB."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B|)", value.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(field, "bytes, such as 1073741824, 512MiB or 2GB", value)
    unit = match[2].upper().rstrip("B")
    base = 1024 if unit.endswith("I") else 1000
    found = float(match[1]) * base ** ("KMGT".index(unit[0]) + 1 if unit else 0)
    if found >= _MAX_BYTES:
        raise ConfigError(field, f"less than {_MAX_BYTES >> 60} EiB", value)
    return int(found)


_MAX_BYTES = 1 << 63
_MISSING = object()
_SECRET = "api_keys"
ALIASES = {
    "O": ("compilation", "level"),
    "cc": ("compilation",),
    "compilation_config": ("compilation",),
}
"""The paths that other spellings of an argument stand for."""


def _nest(raw: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    given: set[tuple[str, ...]] = set()
    in_file = read_file(raw["config"]) if raw.get("config") is not None else {}
    for key, value in (*raw.items(), *in_file.items()):
        head, *rest = str(key).split(".")
        path = (*ALIASES.get(head, (head,)), *rest)
        value = _text_value(value)
        _insert(nested, path, as_object(value) if path == ("compilation",) else value, given)
    return nested


def _insert(
    nested: dict[str, Any], path: tuple[str, ...], value: Any, given: set[tuple[str, ...]]
) -> None:
    """Put a value at its path; a path that is given twice, in whatever spelling, is an error."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _insert(nested, (*path, *str(key).split(".")), inner, given)
        is_mentioned = any(known[: len(path)] == path for known in given)
        if value or is_mentioned:
            return
    if path in given:
        raise ConfigError(".".join(path), "one value", "it twice")
    given.add(path)
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
        if not isinstance(nested, dict):
            raise ConfigError(".".join(path), f"{key} to have fields", nested)
    nested[path[-1]] = value


def _text_value(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{", "null")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _lookup(nested: Any, path: list[str]) -> Any:
    if path[0].startswith(_SECRET):
        return "what is not repeated here"
    for key in path:
        if not isinstance(nested, dict) or key not in nested:
            return _MISSING
        nested = nested[key]
    return nested


def _config_error(message: str, nested: dict[str, Any]) -> ConfigError:
    """Turn msgspec's message into the project's form."""
    at = re.search(r" - at `\$\.?([^`]*)`", message)
    field = at[1] if at else ""
    unknown = re.search(r"unknown field `([^`]+)`", message)
    if unknown:
        name = f"{field}.{unknown[1]}" if field else unknown[1]
        known = _fields_at(field)
        found = _lookup(nested, name.split("."))
        return ConfigError(name, f"one of {', '.join(known)}", found)
    wanted = re.search(r"Expected `([^`]+)`", message)
    found = _lookup(nested, field.split("."))
    return ConfigError(field, wanted[1] if wanted else message, found)


def _fields_at(field: str) -> tuple[str, ...]:
    kinds = {"ingress": IngressArgs, "kv": KVArgs, "": DeployArgs}
    return kinds.get(field, PoolArgs).__struct_fields__


def _max_num_batched_tokens(args: DeployArgs, device: str) -> int:
    if args.max_num_batched_tokens is not None:
        return args.max_num_batched_tokens
    return max(BATCHED_TOKENS_BY_DEVICE[device], args.max_num_seqs)


def _pool_config(
    name: str, args: DeployArgs, role: Role, *, num_ranks: int, is_served: bool = True
) -> PoolConfig:
    pool: PoolArgs = getattr(args, name)
    model_path, model = _model(args)
    lockstep = _lockstep(args.lockstep, model)
    try:
        parallel = ParallelConfig(
            pool.tensor_parallel_size, pool.data_parallel_size, lockstep=lockstep
        )
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.field}", error.wanted, error.found) from None
    _check_heads(name, parallel, model)
    device = _device(args.device)
    scheduler = SchedulerConfig(args.max_num_seqs, _max_num_batched_tokens(args, device))
    engine = EngineConfig(
        model_path=str(model_path),
        max_model_len=_max_model_len(args, model),
        dtype=_dtype(args.dtype, model),
        device=device,
        role=role,
        parallel=parallel,
        cache=CacheConfig(
            block_size=args.block_size,
            num_kv_blocks=args.num_kv_blocks,
            kv_memory_bytes=parse_bytes("kv_memory", args.kv_memory),
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=args.enable_prefix_caching,
        ),
        scheduler=scheduler,
        compilation=resolved(
            args.compilation,
            scheduler,
            name,
            enforce_eager=args.enforce_eager,
            device=device,
            is_served=is_served,
        ),
        transfer=TransferConfig(args.kv.transport, args.kv.lease_s),
        overlap=args.overlap == "on" or (args.overlap == "auto" and device == "cuda"),
        watchdog_s=args.watchdog_s,
        log_format=args.log_format,
    )
    threads = args.threads_per_rank
    if threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    engine = replace(engine, threads=threads)
    if engine.device == "cuda":
        check_warmups(engine.compilation)
    if args.num_kv_blocks is not None:
        check_num_blocks(engine, model.kv_window, args.num_kv_blocks)
    num_cpus = _at_least(f"{name}.num_cpus", pool.num_cpus, 1e-4)
    return PoolConfig(name, pool.replicas, num_cpus, engine, _routing(name, pool.routing))


def _check_other_pools(args: DeployArgs, names: tuple[str, ...]) -> None:
    for other in ("prefill", "decode", "mixed"):
        if other not in names and getattr(args, other) != PoolArgs():
            raise ConfigError(other, f"nothing where pools={args.pools}", "arguments")


def _lockstep(lockstep: str, model: ModelConfig) -> bool:
    """Return whether engines step together, as those must that share experts in each layer."""
    if lockstep == "on":
        return True
    if model.experts is not None:
        raise ConfigError("lockstep", "on for a model with experts", lockstep)
    return False


def _routing(name: str, routing: str) -> Routing:
    try:
        return Routing(routing)
    except ValueError:
        known = ", ".join(known.value for known in Routing)
        raise ConfigError(f"{name}.routing", f"one of {known}", routing) from None


def _num_ranks(name: str, pool: PoolArgs) -> int:
    replicas = int(_at_least(f"{name}.replicas", pool.replicas, 1))
    # An impossible size is refused where the pool is built.
    return replicas * max(pool.tensor_parallel_size, 1) * max(pool.data_parallel_size, 1)


def _num_ingresses(found: int, max_running: int) -> int:
    most = min(MAX_INGRESSES, max_running)
    if not 1 <= found <= most:
        wanted = f"1 to {most} where {max_running} sequences decode at once"
        raise ConfigError("ingress.replicas", wanted, found)
    return found


def _check_equal_ranks(prefill: PoolArgs, decode: PoolArgs) -> None:
    """Each decode rank reads the slice of one prefill rank."""
    wanted, found = prefill.tensor_parallel_size, decode.tensor_parallel_size
    if wanted != found:
        raise ConfigError(
            "decode.tensor_parallel_size",
            f"{wanted} like prefill.tensor_parallel_size (other sizes are not built yet)",
            found,
        )


def _check_heads(name: str, parallel: ParallelConfig, model: ModelConfig) -> None:
    size, data_parallel_size = parallel.tensor_parallel_size, parallel.data_parallel_size
    if size not in (sizes := model.tensor_parallel_sizes(data_parallel_size)):
        heads = f"{model.num_heads} heads and {model.num_kv_heads} KV heads"
        if model.experts is not None:
            heads += f" and {model.experts.num_experts} experts"
            if data_parallel_size > 1:
                heads += f" on {data_parallel_size} data-parallel ranks"
        wanted = f"one of {', '.join(map(str, sizes)) or 'no size'} for a model with {heads}"
        raise ConfigError(f"{name}.tensor_parallel_size", wanted, size)


def _model(args: DeployArgs) -> tuple[Path, ModelConfig]:
    path = Path(args.model).expanduser() if args.model is not None else bundled_model()
    if not (path / "config.json").is_file():
        raise ConfigError("model", "a directory with config.json and safetensors", str(path))
    try:
        return path.absolute(), ModelConfig.from_dir(path)
    except ModelError as error:
        raise ConfigError("model", "a checkpoint that Lockstep can serve", str(error)) from None


def _max_model_len(args: DeployArgs, model: ModelConfig) -> int:
    limit = model.longest_context
    if args.max_model_len is None:
        return model.max_position_embeddings
    if not 1 <= args.max_model_len <= limit:
        raise ConfigError("max_model_len", f"1 to {limit} (the model's)", args.max_model_len)
    return args.max_model_len


def _dtype(dtype: str, model: ModelConfig) -> str:
    names = ("float32", "bfloat16", "float16")
    if dtype == "auto":
        return model.dtype if model.dtype in names else "float32"
    if dtype not in names:
        raise ConfigError("dtype", f"auto, {', '.join(names)}", dtype)
    return dtype


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError("device", "auto, cpu or cuda", device)
    if device != "auto":
        return device
    # Asking torch would cost two seconds of import on every machine without a GPU.
    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _one_of(field: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(field, f"one of {', '.join(known)}", value)
    return value


def _at_least(field: str, value: Any, least: float) -> Any:
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(field, f"a finite number of at least {least:g}", value)
    return value


def _access(args: DeployArgs) -> AccessConfig:
    keys = _texts(args.api_keys)
    check_keys("api_keys", keys)
    file = Path(args.api_keys_file).expanduser().absolute() if args.api_keys_file else None
    if file is not None:
        read_keys(file)
    return AccessConfig(
        api_keys=keys,
        api_keys_file=file,
        open_paths=_texts(args.open_paths),
        allowed_hosts=_texts(args.allowed_hosts),
        allowed_origins=_texts(args.allowed_origins),
    )


def _texts(value: str | list[str]) -> tuple[str, ...]:
    """Return the texts of a list, which may also be one text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(stripped for part in parts if (stripped := part.strip()))


def _served_names(args: DeployArgs) -> tuple[str, ...]:
    """Return what is asked for, or the path's last component as it was given, even if a link."""
    if args.served_model_name:
        names = _texts(args.served_model_name)
        if not names or len(set(names)) < len(names):
            raise ConfigError("served_model_name", "different names", args.served_model_name)
        return names
    if args.model is None:
        return (BUNDLED_NAME,)
    return (Path(args.model).expanduser().absolute().name,)


def _config_hash(engine: EngineConfig, args: DeployArgs) -> str:
    """Identify what two processes must agree on before they exchange tokens or KV.

    Of compilation, what was asked of all pools counts: each pool resolves that by itself.
    """
    content = fingerprint(Path(engine.model_path))
    facts = (
        PROTOCOL_VERSION,
        engine.dtype,
        engine.cache.block_size,
        engine.max_model_len,
        engine.parallel.tensor_parallel_size,
        engine.overlap,
        args.enforce_eager,
        shared_facts(args.compilation),
    )
    return hashlib.sha256(content + repr(facts).encode()).hexdigest()[:16]
