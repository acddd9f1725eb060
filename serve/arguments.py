"""The arguments of `deploy` and of `LLM`: their types, bounds, defaults and spellings.

Arguments come as text (`serve run serve.app:deploy max_num_seqs=8 prefill.replicas=2`) or typed
and nested (YAML), and `config=FILE` adds those of a file. What they mean for a model and a machine
is worked out in `config.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import UNSET, Meta, UnsetType

from cluster.config import (
    MAX_DRAFT_TOKENS,
    MAX_LEASE_S,
    MIN_LEASE_S,
    CacheConfig,
    EngineConfig,
    PlacementStrategy,
    SpeculationConfig,
    TransferConfig,
)
from compile.errors import FieldError
from model.fields import Source, at_least, convert, hints_of, says
from model.lora_config import MAX_RANK
from model.quantization import WeightFormat
from serve.compilation import (
    CudaGraphConfig,
    TorchCompileConfig,
    as_object,
    as_switch,
    compilation_fields,
)
from serve.pools.chooser import Routing

_MAX_BYTES = 1 << 63
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I)?)?B?", re.IGNORECASE)
SECRETS = ("api_keys", "admin_keys")
"""Arguments that no error, log or repr repeats."""
_SHAPES = ("compilation", "dynamic_shapes_config")
_LABELS = "label_selector"
POOLS = ("prefill", "decode", "mixed")
ALIASES = {
    ("O",): ("compilation", "level"),
    ("cc",): ("compilation",),
    ("compilation_config",): ("compilation",),
    (*_SHAPES, "type"): ("compilation", "dynamic_shapes"),
    (*_SHAPES, "evaluate_guards"): ("compilation", "evaluate_guards"),
}
"""The paths that other spellings of an argument stand for, vLLM's among them."""
_DASHED = re.compile(
    r"-O=?(?P<level>\d+)?|(-cc|--compilation[-_]config)(?P<path>(\.[\w.]+)?)(=(?P<value>.*))?",
    re.DOTALL,
)


Positive = Annotated[int, Meta(ge=1), says("a whole number of at least 1")]
Seconds = Annotated[float, Meta(gt=0, le=sys.float_info.max), says("seconds above 0")]
Share = Annotated[float, Meta(gt=0, le=1), says("a share in (0, 1]")]
Switch = Literal["on", "off"]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], says("auto, float32, bfloat16, float16")
]
Quantization = Annotated[
    Literal["auto"] | WeightFormat, says("auto, none, int8, w8a8, int4, fp8 or nvfp4")
]
KVCacheDtype = Annotated[Literal["auto", "fp8", "fp8_e4m3"], says("auto, fp8 or fp8_e4m3")]
LogFormat = Literal["text", "json"]
Host = Annotated[str, Meta(pattern=r"^[\w.:%-]+\Z"), says("an address or a name of this machine")]
LoraRank = Annotated[int, Meta(ge=1, le=MAX_RANK), says(f"1 to {MAX_RANK}")]
DraftTokens = Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS), says(f"1 to {MAX_DRAFT_TOKENS}")]
Port = Annotated[int, Meta(ge=1, le=65535), says("1 to 65535")]
AcceleratorType = Annotated[str, Meta(pattern=r"^[\w.-]+\Z"), says("a name such as H100")]
_LABEL = r"[a-zA-Z0-9]([\w.-]{0,61}[a-zA-Z0-9])?"
LabelKey = Annotated[
    str,
    Meta(pattern=rf"^([a-zA-Z0-9][a-zA-Z0-9.-]{{0,252}}/)?{_LABEL}\Z"),
    says("names of labels, such as ray.io/region"),
]
LabelSelector = Annotated[
    str,
    Meta(pattern=rf"^!?({_LABEL}|(in)?\({_LABEL}(, ?{_LABEL})*\))\Z"),
    says("a label's value, !value, in(value, value) or !in(value, value)"),
]
LeaseS = Annotated[
    float,
    Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S),
    says(f"at least {MIN_LEASE_S:g}, at most {MAX_LEASE_S:g}"),
]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all argument structs: an unknown key is an error."""


class EngineArgs(_Strict, frozen=True):
    """What all pools are told, or one by its own name (`decode.max_num_seqs`), which goes before.
    None means in a pool: as the application; and there: the default."""

    max_num_seqs: Positive | None = None
    """Sequences that run at once in one engine; null: 64."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of one step, at least `max_num_seqs`; longer prompts are computed in chunks. Null:
    2048 on a GPU, 512 on a CPU, which computes no faster in longer steps."""
    max_step_ms: Annotated[float, at_least(0.1)] | None = None
    """Milliseconds that a step should take where sequences decode beside prompts: until it ends,
    all streams stand still. Prompts are computed in chunks that fit, by the steps measured so far,
    but of at least 32 tokens, or 2 for each sequence that decodes if that is more. Null: 250 on a
    CPU; on a GPU `max_num_batched_tokens` is the only limit."""
    num_kv_blocks: Positive | None = None
    """KV blocks of one rank; null: as many as its memory for KV holds."""
    gpu_memory_utilization: Share | None = None
    """Share of a GPU's memory for weights, activations and KV; above 0, at most 1; null: 0.9. Ranks
    that share a GPU (`num_gpus`) need shares that add up."""
    kv_memory: int | str | None = None
    """Memory for KV on a CPU: bytes, or text such as `512MiB` or `2GB`; null: 1 GiB."""
    threads_per_rank: Positive | None = None
    """Threads of one rank's tensor operations on a CPU; null: the cores of its node, divided by the
    application's ranks that are there when it starts. Code that is compiled for another number of
    threads is compiled again."""
    num_cpus: Annotated[float, at_least(1e-4)] | None = None
    """CPUs that each rank reserves in Ray; null: 0.01, next to nothing, so that it starts on any
    machine."""
    num_gpus: Share | None = None
    """GPUs that each rank reserves in Ray, above 0 and at most 1; null: 1 with `device=cuda`."""
    accelerator_type: AcceleratorType | None = None
    """The kind of accelerator that its nodes have, as Ray calls it, such as `H100`; null: any."""
    label_selector: dict[LabelKey, LabelSelector] | None = None
    """Labels that its nodes have, as Ray selects by them: `{"zone": "a"}`, `!a` or `in(a, b)`;
    null: any."""
    placement_strategy: PlacementStrategy | None = None
    """How Ray places a replica and its ranks: `STRICT_PACK`, all on one node; `PACK`, on as few as
    can be; `SPREAD` and `STRICT_SPREAD`, on many. Null: `STRICT_PACK`. A group that is larger than
    a node needs another, and tensor-parallel ranks on two nodes are slow."""
    compilation: dict[str, Any] = {}
    """`compilation.*`, alias `cc.*`: fields of `CompilationConfig`, those that are given. A pool
    has the application's where its own say nothing."""


class PoolArgs(EngineArgs, frozen=True):
    """`prefill.*`, `decode.*` and `mixed.*`."""

    replicas: Annotated[int, at_least(1)] = 1
    """Rank groups in the pool; with `max_replicas`, those that it starts with."""
    min_replicas: Positive | None = None
    """The fewest rank groups of a pool that is scaled; null: `replicas`."""
    max_replicas: Positive | None = None
    """The most. The pool then grows and shrinks with its load, so that requests keep
    `ttft_target_s` and `tpot_target_s`; null: it always has `replicas`."""
    tensor_parallel_size: Positive = 1
    """Ranks that hold the model together: a number that its heads allow, the same in both pools."""
    data_parallel_size: Positive = 1
    """Engines in a rank group, each with its own KV, that run every step together."""
    routing: Routing = Routing.COST
    """Which engine of a pool gets a request: with `cost` the one where it takes the fewest seconds,
    by what is queued there, what of its prompt is cached there, and measured steps; or
    `round_robin`, `least_requests` or `least_tokens`."""


class PrefillArgs(PoolArgs, frozen=True):
    """`prefill.*`."""

    on_decode: Literal["never", "auto"] = "never"
    """`auto`: a decode engine computes a prompt itself where that costs fewer seconds than to have
    it computed and handed over, those included that its other sequences lose by it; `never`: new
    prompts run in the prefill pool alone. Needs `routing=cost` of both pools."""


class IngressArgs(_Strict, frozen=True):
    """`ingress.*`."""

    replicas: int = 1
    """Processes that take requests and send tokens; as many as sequences decode at once, and at
    most 64. What may run and wait is divided among them, and so bounds the sequences of one
    request."""


class KVArgs(_Strict, frozen=True):
    """`kv.*`."""

    transport: str = TransferConfig.transport
    """`shm` (shared memory, not on GPUs) or `tcp`; `auto`: shared memory within a node where it can
    be opened, else TCP."""
    lease_s: LeaseS = TransferConfig.lease_s
    """How long a prefill rank holds KV without hearing from its reader; 0.01 to 86400."""


class SpeculativeArgs(_Strict, frozen=True):
    """`speculative_config.*`."""

    method: Literal["ngram", "mtp", "deepseek_mtp"]
    """`ngram`: the tokens that followed when the sequence's last few came before, in its prompt or
    its output. `mtp`: those that the checkpoint's own layer for that predicts (DeepSeek-V3's
    multi-token prediction), `deepseek_mtp` the same. No other method is built yet."""
    num_speculative_tokens: DraftTokens
    """Draft tokens of a sequence in a step, at most; 1 to 64."""
    prompt_lookup_max: DraftTokens = SpeculationConfig.prompt_lookup_max
    """Of `ngram`: of the sequence's last tokens, the longest run that is looked for; 1 to 64."""
    prompt_lookup_min: DraftTokens = SpeculationConfig.prompt_lookup_min
    """The shortest; at most `prompt_lookup_max`."""
    mtp_eagle_one_model: bool = True
    """As in TensorRT-LLM; false is refused."""
    eagle3_one_model: bool = True
    """The same."""

    def __post_init__(self) -> None:
        for name in ("mtp_eagle_one_model", "eagle3_one_model"):
            if not getattr(self, name):
                wanted = "true (two model engines cannot be compiled as one forward)"
                raise FieldError(f"speculative_config.{name}", wanted, False)

    @property
    def is_mtp(self) -> bool:
        return self.method != "ngram"

    @property
    def resolved(self) -> SpeculationConfig:
        shared = {field.name: getattr(self, field.name) for field in fields(SpeculationConfig)}
        return SpeculationConfig(**shared)


class DeployArgs(EngineArgs, frozen=True):
    """Every argument with its default; None means: taken from the model or the machine."""

    model: str | None = None
    """A directory with `config.json`, safetensors and tokenizer (Llama, Mistral, Mixtral, Qwen2,
    Qwen3, Qwen3-MoE, DeepSeek-V2 and V3); null: the bundled model."""
    served_model_name: str | list[str] | None = None
    """What requests call the model; of several names, in a list or separated by commas, the first
    is reported. Null: the last part of its path."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` or `cuda`; `auto` is what the machine that deploys has, and is refused where that one
    has no GPU and others do."""
    dtype: Dtype = "auto"
    """`float32`, `bfloat16` or `float16`, of weights (quantized ones too, once they are read),
    activations and, with `kv_cache_dtype=auto`, KV; `auto`: the checkpoint's."""
    max_model_len: int | None = None
    """Prompt and output tokens of one request, with rotary scaling up to the scaled context; null:
    the model's."""
    quantization: Quantization = "auto"
    """`int8` or `int4`: linear layers of attention and MLPs, experts too, hold integers with
    scales, whatever the checkpoint has: half or a quarter of the memory of `bfloat16`, and
    tokens may differ. A scale is for one output with `int8`, for 128 inputs of one with `int4`.
    `w8a8`, on a CPU only: `int8` whose inputs are rounded as well, each token by a scale of its
    own, as W8A8 checkpoints are meant; steps are up to 1.7 times as fast as with `bfloat16`.
    `fp8`: half the memory, the checkpoint's numbers where they are FP8; inputs of these layers
    are rounded as well, each token, or each 128 inputs of it, by a scale of its own. `nvfp4`:
    FP4 numbers as a checkpoint of format `nvfp4-pack-quantized` has them, a quarter of the
    memory, and inputs rounded by its scales. On a CPU, products of FP8 and FP4 numbers are right
    but slow, with `fp8` up to sixty times slower than with `none`. `none`: numbers of `dtype`.
    Embeddings, head and routers always are that. `auto`: on a GPU `fp8` or `nvfp4` where a
    checkpoint has such numbers, otherwise `none`."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """`fp8` or `fp8_e4m3`: KV takes a byte a number, so that twice as many blocks fit as with
    `bfloat16`, and tokens may differ; by the checkpoint's scales `k_scale` and `v_scale`, or 1.
    `auto`: the checkpoint's `kv_cache_scheme`, else as `dtype`."""
    block_size: Positive = CacheConfig.block_size
    """Tokens in one KV block."""
    enable_prefix_caching: bool = CacheConfig.enable_prefix_caching
    """Whether prompts that begin alike share KV."""
    prefix_cache_sharing: Literal["key", "all"] = "key"
    """With API keys, whose prompts share KV: `key`, those of one key, since what is found tells how
    others' begin; `all`, those of all. A request's `cache_salt` divides either further."""
    pools: Literal["pd", "mixed"] = "pd"
    """`pd`: a prefill and a decode pool; `mixed`: one pool that does both."""
    prefill: PrefillArgs = PrefillArgs()
    """The prefill pool."""
    decode: PoolArgs = PoolArgs()
    """The decode pool."""
    mixed: PoolArgs = PoolArgs()
    """The mixed pool."""
    ingress: IngressArgs = IngressArgs()
    """What clients reach."""
    lockstep: Switch = "on"
    """`off`: data-parallel engines of a dense model step apart; those of a model with experts
    cannot."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """`on`: a step is planned while the device runs the one before; `off`: after it; `auto`: `on`
    with `device=cuda`. A CPU runs a step before its launch returns, so nothing is won there."""
    disable_custom_all_reduce: bool = False
    """GPUs of tensor-parallel ranks leave all sums to NCCL. Otherwise small ones that a norm
    follows go through memory that the GPUs map from one another, where NVLink joins them all; the
    log says which."""
    kv: KVArgs = KVArgs()
    """How KV travels from prefill to decode ranks."""
    single_node: bool = False
    """The cluster has one node and is to have no other: ranks listen on its loopback interface
    alone. What starts once there are more nodes fails."""
    enforce_eager: bool = False
    """Compile and capture nothing."""
    torch_compile_config: TorchCompileConfig | UnsetType | None = UNSET
    """Compilation fields as TensorRT-LLM spells them; null: compilation is off."""
    cuda_graph_config: CudaGraphConfig | UnsetType | None = UNSET
    """Graph fields as TensorRT-LLM spells them; null: decode steps replay no full graphs."""
    speculative_config: SpeculativeArgs | None = None
    """What a sequence may say next is drafted and checked several tokens at once, as in vLLM:
    `{"method": "ngram", "num_speculative_tokens": 3}`. Tokens are those that come without."""
    lora_modules: str | list[str] = ""
    """LoRA adapters as PEFT saves them, each `name=directory`, in a list or separated by commas;
    all nodes need the files. Requests with `model=name` are answered by the model with that
    adapter. Each takes the memory of the one with the highest rank, 512 at most."""
    max_loras: Positive | None = None
    """Adapters at once, those of `lora_modules` included: the others are loaded and unloaded while
    the application serves, by `/v1/load_lora_adapter`, and their memory is reserved from the start.
    Null: those of `lora_modules` alone."""
    max_lora_rank: LoraRank | None = None
    """The highest rank of an adapter that is loaded while the application serves, whose memory each
    of these takes; 1 to 512, null: 16."""
    ttft_target_s: Seconds = 2.0
    """The time to a first token that prefill and mixed pools are scaled to keep, if they are: so
    long may prompts wait to be computed."""
    tpot_target_s: Seconds = 0.1
    """The time between two tokens that decode and mixed pools are scaled to keep. One that a step
    of a single sequence exceeds keeps a pool at `max_replicas`."""
    scale_down_after_s: Seconds = 300.0
    """How long one replica less must have been enough before a pool that is scaled loses one."""
    max_queued_requests: Annotated[int, at_least(0)] = 256
    """Sequences that wait beyond those that run; more get 429."""
    max_queue_wait_s: Annotated[float, at_least(0.001)] = 60.0
    """How long sequences may have to wait, at the rate at which others have ended in the last 30 s;
    beyond that a request gets 429. One that no engine takes for so long gets 503."""
    request_timeout_s: Annotated[float, at_least(0.001)] = 600.0
    """For receiving a request, and again for answering it to the last byte."""
    drain_timeout_s: Annotated[float, at_least(0.0)] = 30.0
    """How long what runs may take once `serve run` got SIGTERM or SIGHUP; new requests get 503
    meanwhile. Also how long what runs in a pool replica may that Serve stops."""
    watchdog_s: Seconds = EngineConfig.watchdog_s
    """How long a rank may stay in one phase of a step before its group is rebuilt; or five times
    what the step should take, if that is longer."""
    max_body_bytes: Annotated[int, at_least(1)] = 8 << 20
    """Bytes of one request's body; a larger one gets 413."""
    max_answer_bytes: Annotated[int, at_least(1 << 16)] = 64 << 20
    """How large a streamed answer may become by what its request asks for, a whole one to a quarter
    of that. More gets 400, or fewer tokens where `max_tokens` was left out. At least 64 KiB."""
    stream_interval: Annotated[int, at_least(1)] = 1
    """Tokens that a chunk of a stream has at least; its first and last tokens come at once. With
    more than four streams chunks hold what comes between two ticks of at most 0.1 s."""
    api_keys: str | list[str] = ""
    """Bearer keys of clients, separated by commas; empty: none are needed. Keys on a command line
    are seen in `ps`."""
    api_keys_file: str | None = None
    """A file with one key a line, read again when it changes."""
    admin_keys: str | list[str] = ""
    """Bearer keys of those who may load and unload adapters, separated by commas; needed where
    `max_loras` leaves room for some. They are no `api_keys`, and those may not do it. Keys on a
    command line are seen in `ps`."""
    open_paths: str | list[str] = "/,/page.css,/page.js,/status,/health,/ready,/version,/metrics"
    """Paths that need no key."""
    allowed_hosts: str | list[str] = ""
    """Without keys: names that requests may call this server by, beside addresses and private
    names; `*` allows all."""
    allowed_origins: str | list[str] = ""
    """Without keys: other servers whose pages may ask (CORS); `*` allows all."""
    trusted_proxies: Annotated[int, at_least(0)] = 0
    """Proxies of your own in front of Ray's that each add to `X-Forwarded-For` where they were
    asked from; without keys a client is known by that. 0: the header is ignored."""
    log_format: LogFormat = "text"
    """Of the log: `text`, or `json` for an object a line."""
    log_requests: Switch = "on"
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
    host: Host | None = None
    """The address that `serve run serve.app:deploy` listens on, `0.0.0.0` for all; null: Ray
    Serve's, `127.0.0.1`, behind HAProxy all. A Serve YAML names it in `http_options`."""
    port: Port | None = None
    """The port beside it, 1 to 65535; null: Ray Serve's, 8000. Where Serve runs in the cluster
    already, both must be what it has."""
    config: str | None = None
    """A YAML file of these arguments ([bundled.yaml](../examples/configs/bundled.yaml)); none may
    be given both in it and beside it. `LLM` takes the same file."""

    @property
    def needs_key(self) -> bool:
        return bool(texts(self.api_keys) or self.api_keys_file)

    @property
    def divides_prefix_cache(self) -> bool:
        """Whether each key finds in the prefix cache what it has left there alone."""
        return self.needs_key and self.prefix_cache_sharing == "key"


def texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return the texts of a list, which may also be one text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(stripped for part in parts if (stripped := part.strip()))


def parse_args(raw: Mapping[str, Any], **defaults: Any) -> DeployArgs:
    """Turn key=value text or typed nested values into `DeployArgs`. A text value that parses as a
    JSON list, object or null is taken as JSON; all other text is converted to the field's type.
    `defaults` hold where neither `raw` nor its file says anything."""
    kinds, nested = hints_of(DeployArgs), {**defaults, **_nest(raw)}
    nested = {name: as_switch(value, kinds.get(name)) for name, value in nested.items()}
    try:
        args = convert(nested, DeployArgs, Source.ARGUMENT)
    except FieldError as error:
        if error.field.startswith(SECRETS):
            raise FieldError(error.field, error.wanted, "what is not repeated here") from None
        raise
    fields = compilation_fields(args.compilation, args.torch_compile_config, args.cuda_graph_config)
    pools = {name: _with_fields(getattr(args, name), name, fields) for name in POOLS}
    return msgspec.structs.replace(args, compilation=fields, config=None, **pools)  # which is read


def _with_fields(pool: PoolArgs, name: str, of_all: Mapping[str, Any]) -> PoolArgs:
    """Return a pool with all compilation fields that it is told, if it has some of its own."""
    if not pool.compilation:
        return pool
    try:
        fields = compilation_fields({**of_all, **pool.compilation}, UNSET, UNSET)
    except FieldError as error:  # those of all have been found good
        raise error.at(name) from None
    return msgspec.structs.replace(pool, compilation=fields)


def own_settings(args: DeployArgs, pool: str) -> dict[str, Any]:
    """Return the settings in which a pool goes before the application, by their names."""
    told: PoolArgs = getattr(args, pool)
    settings = {name: getattr(told, name) for name in EngineArgs.__struct_fields__}
    return {name: value for name, value in settings.items() if value not in (None, {})}


def split_dashed(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return compilation fields as vLLM's command line spells them, and all other arguments. `-O3`
    is a level, `-cc.cudagraph_mode=FULL` one field, `-cc '{"level": 3}'` several."""
    nested: dict[str, Any] = {}
    given: set[tuple[str, ...]] = set()
    others: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            return nested, [*others, argument, *waiting]
        if (found := _DASHED.fullmatch(argument)) is None:
            others.append(argument)
            continue
        key = "O" if found["path"] is None else f"cc{found['path']}"
        value = found["level"] or found["value"]
        if value is None and not waiting:
            raise FieldError(argument, "a value", "the end of the line")
        _add(nested, key, waiting.pop(0) if value is None else value, given)
    return nested, others


def parse_bytes(field: str, value: int | str) -> int:
    """Return a number of bytes from a number or from text such as 512MiB or 2GB."""
    found: float
    if isinstance(value, int):
        found = value
    elif (match := _BYTES.fullmatch(value.strip())) is None:
        raise FieldError(field, "bytes, such as 1073741824, 512MiB or 2GB", value)
    else:
        number, unit, is_binary = match.groups("")
        exponent = "KMGT".index(unit.upper()) + 1 if unit else 0
        found = float(number) * (1024 if is_binary else 1000) ** exponent
    if not 1 <= found < _MAX_BYTES:
        raise FieldError(field, f"at least 1 and less than {_MAX_BYTES >> 60} EiB", value)
    return int(found)


# How arguments that are given become one nested dictionary.


def _nest(raw: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    given: set[tuple[str, ...]] = set()
    in_file = _read_file(raw["config"]) if raw.get("config") is not None else {}
    for key, value in (*raw.items(), *in_file.items()):
        _add(nested, str(key), value, given)
    return nested


def _add(nested: dict[str, Any], key: str, value: Any, given: set[tuple[str, ...]]) -> None:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{", "null")):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    _insert(nested, tuple(key.split(".")), value, given)


def _insert(
    nested: dict[str, Any], path: tuple[str, ...], value: Any, given: set[tuple[str, ...]]
) -> None:
    """Put a value at its path; a path that is given twice, in whatever spelling, is an error."""
    pool, path = (path[:1], path[1:]) if path[0] in POOLS else ((), path)
    for length in (1, 3):
        path = (*ALIASES.get(path[:length], path[:length]), *path[length:])
    if path == ("compilation",):
        value = as_object(value)
    is_leaf = path == (_LABELS,)  # whose keys may have dots
    path = (*pool, *path)
    is_mentioned = any(known[: len(path)] == path for known in given)
    if isinstance(value, dict) and not is_leaf:
        for key, inner in value.items():
            _insert(nested, (*path, *str(key).split(".")), inner, given)
        if value or is_mentioned or path[-2:] == _SHAPES:
            return
    elif is_mentioned:
        raise FieldError(".".join(path), "one value", "it twice")
    given.add(path)
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
        if not isinstance(nested, dict):
            raise FieldError(".".join(path), f"{key} to have fields", nested)
    nested[path[-1]] = value


def _read_file(name: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise FieldError("config", "the name of a YAML file", name)
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        _check_keys(yaml.compose(text, yaml.SafeLoader), (), ())
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are no UTF-8"
        raise FieldError("config", "a YAML file", f"{path}: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = f"{error.problem} in line {mark.line + 1}" if mark else "no YAML"  # type: ignore[attr-defined]
        raise FieldError("config", "a YAML file", f"{path}: {reason}") from None
    if not isinstance(found, dict | None):
        kind = "list" if isinstance(found, list) else "single value"
        raise FieldError("config", "a YAML file of keys and values", f"{path}: a {kind}")
    if "config" in (found or {}):
        raise FieldError("config", "a file that names no other", str(path))
    return found or {}


def _check_keys(
    node: yaml.Node | None, path: tuple[str, ...], outer: tuple[yaml.Node, ...]
) -> None:
    """Refuse keys that are given twice, of which YAML readers keep the last in silence. Keys that
    are no text are refused too, and an anchor that contains itself."""
    if node in outer:
        raise FieldError(".".join(path), "a value that does not contain itself", "an alias of it")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, path, (*outer, node))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise FieldError(".".join(path) or "config", "keys that are text", "a list or object")
        field = (*path, key.value)
        if key.value in seen:
            line = key.start_mark.line + 1
            raise FieldError(".".join(field), "one value", f"it twice, again in line {line}")
        seen.add(key.value)
        _check_keys(value, field, (*outer, node))
