"""What `deploy` and `LLM` run, resolved from their arguments, the model and the machine. Every
error is one line, `FIELD: wanted ..., found ...`, and is raised before anything is started."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from cluster.actors.reports import ScalingTargets
from cluster.config import (
    DEFAULT_NUM_CPUS,
    CacheConfig,
    EngineConfig,
    LoraModule,
    ParallelConfig,
    Placement,
    Role,
    SchedulerConfig,
    TransferConfig,
)
from cluster.engine.blocks import check_num_blocks
from cluster.observe.metrics import Described
from cluster.wire.messages import PROTOCOL_VERSION
from compile.config import KEYED_FIELDS, CompilationConfig
from compile.errors import FieldError, Words
from compile.resolve import PRESETS, resolve
from model.config import KV_AXES, ModelConfig, fingerprint
from model.lora_config import LoraConfig
from model.quantization import WeightFormat
from serve.arguments import (
    POOLS,
    SECRETS,
    DeployArgs,
    EngineArgs,
    PoolArgs,
    own_settings,
    parse_args,
    parse_bytes,
    texts,
)
from serve.clients import check_keys, read_keys
from serve.compilation import check_names
from serve.observe.tracing import check_endpoint
from serve.openai.answer_parser import ReasoningFormat
from serve.openai.tool_parser import ToolFormat
from serve.pools.chooser import Routing

BUNDLED_NAME = "lockstep-tiny"
BATCHED_TOKENS_BY_DEVICE = {"cuda": 2048, "cpu": 512}
"""A GPU's longer steps compute more tokens a second. A CPU's do not, while the first token of every
prompt in them, and the next one of every stream, waits for their end."""
STEP_MS_BY_DEVICE = {"cuda": None, "cpu": 250.0}
"""A CPU may need a second for `BATCHED_TOKENS_BY_DEVICE`. The shorter chunks are, the fewer
sequences decode together: of a model that is so slow, 8 streams have as many tokens a second in
chunks of a quarter of that, and 32 streams a tenth fewer."""
NUMERICS_VERSION = 2
"""Counted up with each change of kernels, of the sampler or of a request's fields by which requests
get other tokens than from the release before."""
MAX_INGRESSES = 64
"""Engines send to 128 addresses, and while a deployment is replaced both have theirs."""
MAX_SEQUENCES = 1024
"""Sequences of one request (prompts times `n`), or as many as may be alive if those are fewer;
more get 400."""
RETRY_AFTER_S = 2
"""What a client is told to wait by Ray's proxy or while the pools load, and at least where no place
is free."""


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    served_model_name: str
    """What answers call the model."""
    other_model_names: tuple[str, ...] = ()
    """What requests may call it besides."""
    adapter_names: tuple[str, ...] = ()
    """What requests call it with each adapter of `lora_modules`, in their order. `ServedModels`
    knows what a name means."""
    max_model_len: int
    """Tokens of prompt and output together."""
    args: DeployArgs = DeployArgs()
    """What `deploy` was asked for."""
    retry_after_s: float = RETRY_AFTER_S
    """The `Retry-After` of requests before the pools are ready."""
    max_sequences: int = MAX_SEQUENCES
    """Of one request: the prompts of a completions request, each with `n` choices."""
    vocab_size: int | None = None
    """Token ids that the model knows, fewer or more than its tokenizer's; None: as many."""
    max_prompt_len: int | None = None
    """The longest prompt whose KV the model can compute; None: any."""
    cache_info: tuple[tuple[str, str], ...] = ()
    """Labels of the metric `cache_config_info`."""

    @property
    def described(self) -> Described:
        return Described(self.served_model_name, self.max_model_len, self.cache_info)


@dataclass(frozen=True)
class PoolConfig:
    """Invariant: `min_replicas` <= `replicas` <= `max_replicas`; all are equal unless the pool is
    scaled."""

    name: str
    replicas: int
    """Those that it starts with."""
    placement: Placement
    engine: EngineConfig
    targets: ScalingTargets
    scale_down_after_s: float
    min_replicas: int
    max_replicas: int
    routing: Routing = Routing.COST

    @property
    def is_scaled(self) -> bool:
        return self.min_replicas < self.max_replicas

    @property
    def replica_places(self) -> int:
        """Sequences that run at once in one replica."""
        return self.engine.scheduler.max_num_seqs * self.engine.parallel.data_parallel_size


@dataclass(frozen=True)
class DeployConfig:
    """Everything that a deployment is built from. Invariant: `pools` is (prefill, decode) or
    (mixed,)."""

    model_path: str
    pools: tuple[PoolConfig, ...]
    config_hash: str
    """Of all that ranks are told, and Serve about them."""
    numerics_hash: str
    """Of all that decides which tokens a request gets, see `Hashes`."""
    api: ApiSettings = field(repr=False)
    """The keys among its arguments are not to be seen in a log."""

    @property
    def args(self) -> DeployArgs:
        return self.api.args

    @property
    def max_on_decode(self) -> int:
        """Tokens of a decode engine's step, if it may compute prompts that are new; else 0."""
        may_compute = self.args.prefill.on_decode == "auto"
        return self.pools[-1].engine.scheduler.max_num_batched_tokens if may_compute else 0

    @property
    def max_running(self) -> int:
        """Sequences that run at once, with as many replicas as there always are."""
        return self.pools[-1].min_replicas * self.pools[-1].replica_places

    @property
    def num_ingresses(self) -> int:
        return self.args.ingress.replicas

    def ingress_share(self, num_replicas: int) -> tuple[int, int]:
        """Return how many sequences of one ingress may run and wait while the last pool has so many
        replicas."""
        max_running = num_replicas * self.pools[-1].replica_places
        running = max_running // self.num_ingresses
        max_live = max_running + self.args.max_queued_requests
        return running, max_live // self.num_ingresses - running


def bundled_model() -> Path:
    here = Path(__file__).resolve().parent
    for path in (here / "bundled" / "tiny", here.parent / "examples" / "tiny"):
        if (path / "config.json").is_file():
            return path
    raise FieldError("model", "the bundled checkpoint in examples/tiny", None)


def deploy_config(raw: Mapping[str, Any]) -> DeployConfig:
    """Resolve the arguments of `deploy`; raise FieldError for what cannot be used."""
    args = parse_args(raw)
    for name, known in (
        ("tool_call_parser", ("auto", *(known.value for known in ToolFormat))),
        ("reasoning_parser", tuple(known.value for known in ReasoningFormat)),
    ):
        if (found := getattr(args, name)) not in known:
            raise FieldError(name, f"one of {', '.join(known)}", found)
    if args.otlp_traces_endpoint:
        check_endpoint(args.otlp_traces_endpoint)
    names = ("prefill", "decode") if args.pools == "pd" else ("mixed",)
    _check_other_pools(args, names)
    wanted, size = args.prefill.tensor_parallel_size, args.decode.tensor_parallel_size
    if args.pools == "pd" and wanted != size:
        # Each decode rank reads the slice of one prefill rank.
        like = f"{wanted} like prefill.tensor_parallel_size (other sizes are not built yet)"
        raise FieldError("decode.tensor_parallel_size", like, size)
    if args.prefill.on_decode == "auto":
        for name in names:
            if (routing := getattr(args, name).routing) is not Routing.COST:
                field = "prefill.on_decode"
                raise FieldError(field, f"never where {name}.routing={routing.value}", "auto")
    path, model = _model(args)
    pools = tuple(_pool_config(name, args, path, model) for name in names)
    num_ingresses = args.ingress.replicas
    max_running = pools[-1].min_replicas * pools[-1].replica_places
    most = min(MAX_INGRESSES, max_running)
    if not 1 <= num_ingresses <= most:
        wanted_ingresses = f"1 to {most} where {max_running} sequences decode at once"
        raise FieldError("ingress.replicas", wanted_ingresses, num_ingresses)
    served_model_name, *other_model_names = _served_names(args)
    engine = pools[0].engine
    api = ApiSettings(
        served_model_name=served_model_name,
        other_model_names=tuple(other_model_names),
        adapter_names=_adapter_names(engine, (served_model_name, *other_model_names)),
        max_model_len=engine.max_model_len,
        args=_with_checked_keys(args),
        max_sequences=min(MAX_SEQUENCES, (max_running + args.max_queued_requests) // num_ingresses),
        vocab_size=model.vocab_size,
        max_prompt_len=model.max_prompt_len,
        cache_info=(
            ("block_size", str(engine.cache.block_size)),
            ("cache_dtype", engine.kv_dtype),
            ("enable_prefix_caching", str(engine.cache.enable_prefix_caching)),
            ("gpu_memory_utilization", str(engine.cache.gpu_memory_utilization)),
        ),
    )
    content = b"".join(map(fingerprint, (path, *map(Path, engine.lora_paths))))
    pools = tuple(replace(p, engine=replace(p.engine, kv_hash=_kv_hash(content, p))) for p in pools)
    config_hash = _digest(content, PROTOCOL_VERSION, pools)
    return DeployConfig(str(path), pools, config_hash, _numerics_hash(content, pools), api)


def check_device(config: DeployConfig, num_gpus: float) -> None:
    """Refuse to serve on CPUs because the machine that deploys is the one without a GPU."""
    if config.args.device == "auto" and num_gpus and config.pools[0].engine.device == "cpu":
        wanted = f"cpu or cuda (torch found no GPU where deploy ran, the cluster has {num_gpus:g})"
        raise FieldError("device", wanted, "auto")


def check_num_nodes(placement: Placement, num_nodes: int) -> None:
    """Refuse what cannot reach, or be reached by, the rest of its application."""
    if placement.is_single_node and num_nodes > 1:
        raise FieldError("single_node", f"false in a cluster of {num_nodes} nodes", True)


def offline_pool(raw: Mapping[str, Any]) -> PoolConfig:
    """Resolve the same arguments for one rank group without a server (`LLM`)."""
    args = parse_args(raw, pools="mixed")
    if args.pools != "mixed":
        raise FieldError("pools", "mixed without a server", args.pools)
    _check_other_pools(args, ("mixed",))
    if args.mixed.replicas != 1:
        wanted = "1 without a server (mixed.data_parallel_size is how many engines there are)"
        raise FieldError("mixed.replicas", wanted, args.mixed.replicas)
    pool = _pool_config("mixed", args, *_model(args), is_served=False)
    if pool.engine.compilation.serve_while_compiling == "on":
        field = "compilation.serve_while_compiling"
        raise FieldError(field, "auto or off without a server", "on")
    return pool


def _pool_config(
    name: str, args: DeployArgs, path: Path, model: ModelConfig, *, is_served: bool = True
) -> PoolConfig:
    """Return one pool's configuration; an error names the pool whose own settings it is about."""
    own = own_settings(args, name)
    try:
        told = msgspec.structs.replace(args, **own)
        return _resolved(name, told, path, model, is_served=is_served)
    except FieldError as error:
        is_own = bool(own) and error.field.split(".")[0] in EngineArgs.__struct_fields__
        raise error.at(name if is_own else "") from None


def _resolved(
    name: str, args: DeployArgs, path: Path, model: ModelConfig, *, is_served: bool
) -> PoolConfig:
    pool: PoolArgs = getattr(args, name)
    lockstep = args.lockstep == "on"
    if not lockstep and model.experts is not None:
        raise FieldError("lockstep", "on for a model with experts", args.lockstep)
    parallel = ParallelConfig(pool.tensor_parallel_size, pool.data_parallel_size, lockstep=lockstep)
    _check_heads(name, parallel, model)
    device = _device(args.device)
    num_seqs = args.max_num_seqs or SchedulerConfig.max_num_seqs
    default_tokens = max(BATCHED_TOKENS_BY_DEVICE[device], num_seqs)
    step_ms = args.max_step_ms or STEP_MS_BY_DEVICE[device]
    scheduler = SchedulerConfig(
        num_seqs,
        args.max_num_batched_tokens or default_tokens,
        None if step_ms is None else step_ms / 1e3,
    )
    # A prefill engine's sequences end with their first token.
    told = args.speculative_config
    has_mtp = told is not None and told.is_mtp
    if told is not None and told.is_mtp and (found := model.num_nextn_predict_layers) != 1:
        wanted = "ngram for a model without one layer that predicts a token more "
        wanted += f"(num_nextn_predict_layers={found})"
        raise FieldError("speculative_config.method", wanted, told.method)
    speculation = None if told is None or name == Role.PREFILL.value else told.resolved
    has_fp8_kv = args.kv_cache_dtype != "auto" or model.has_fp8_kv
    if has_fp8_kv and model.latent is not None:
        wanted = "auto, and a checkpoint without kv_cache_scheme, for a model that caches latents"
        raise FieldError("kv_cache_dtype", wanted, args.kv_cache_dtype)
    lora_modules = _lora_modules(args)
    max_loras = _max_loras(args, len(lora_modules))
    engine = EngineConfig(
        model_path=str(path),
        max_model_len=_max_model_len(args, model),
        dtype=model.dtype if args.dtype == "auto" else args.dtype,
        quantization=_held_weights(args, model, device),
        device=device,
        role=Role(name),
        parallel=parallel,
        cache=CacheConfig(
            block_size=args.block_size,
            num_kv_blocks=args.num_kv_blocks,
            kv_memory_bytes=CacheConfig.kv_memory_bytes
            if args.kv_memory is None
            else parse_bytes("kv_memory", args.kv_memory),
            gpu_memory_utilization=args.gpu_memory_utilization
            or CacheConfig.gpu_memory_utilization,
            enable_prefix_caching=args.enable_prefix_caching,
            dtype="fp8" if has_fp8_kv else "auto",
            has_mtp=has_mtp,
        ),
        scheduler=scheduler,
        compilation=CompilationConfig(**args.compilation),
        transfer=TransferConfig(args.kv.transport, args.kv.lease_s),
        has_custom_all_reduce=not args.disable_custom_all_reduce,
        overlap=args.overlap == "on"
        or (args.overlap == "auto" and device == "cuda" and speculation is None),
        speculation=speculation,
        lora_modules=lora_modules,
        max_loras=max_loras if is_served else 0,
        max_lora_rank=args.max_lora_rank or EngineConfig.max_lora_rank,
        threads=args.threads_per_rank,
        watchdog_s=args.watchdog_s,
        log_format=args.log_format,
    )
    resolved = resolve(  # a rank's attention backend may still reduce it
        engine.compilation,
        engine.step_limits,
        preset=PRESETS[name],
        enforce_eager=args.enforce_eager,
        device=device,
        is_served=is_served,
    )
    engine = replace(engine, compilation=resolved)
    check_names(engine.compilation)
    if args.num_kv_blocks is not None:
        check_num_blocks(engine, model.kv_window, args.num_kv_blocks)
    least, most = _replica_bounds(name, pool)
    targets = ScalingTargets(
        args.ttft_target_s,
        args.tpot_target_s,
        scheduler.max_num_seqs,
        parallel.data_parallel_size,
    )
    return PoolConfig(
        name=name,
        replicas=max(pool.replicas, least),
        placement=_placement(args, device),
        engine=engine,
        targets=targets,
        scale_down_after_s=args.scale_down_after_s,
        min_replicas=least,
        max_replicas=most,
        routing=pool.routing,
    )


def _placement(args: DeployArgs, device: str) -> Placement:
    if device == "cpu" and args.num_gpus is not None:
        raise FieldError("num_gpus", "nothing with device=cpu", args.num_gpus)
    return Placement(
        num_cpus=args.num_cpus or DEFAULT_NUM_CPUS,
        num_gpus=(args.num_gpus or 1.0) if device == "cuda" else 0.0,
        accelerator_type=args.accelerator_type,
        label_selector=args.label_selector or {},
        strategy=args.placement_strategy or Placement.strategy,
        is_single_node=args.single_node,
    )


def _replica_bounds(name: str, pool: PoolArgs) -> tuple[int, int]:
    least, most = pool.min_replicas, pool.max_replicas
    if most is None:
        if least is not None:
            raise FieldError(f"{name}.max_replicas", f"a number beside {name}.min_replicas", None)
        return pool.replicas, pool.replicas
    least = pool.replicas if least is None else least
    if most < max(pool.replicas, least):
        field = "replicas" if pool.replicas >= least else "min_replicas"
        wanted = f"at least {max(pool.replicas, least)} ({name}.{field})"
        raise FieldError(f"{name}.max_replicas", wanted, most)
    return least, most


def _check_other_pools(args: DeployArgs, names: tuple[str, ...]) -> None:
    for other in POOLS:
        told = getattr(args, other)
        if other not in names and told != type(told)():
            raise FieldError(other, f"nothing where pools={args.pools}", "arguments")


def _check_heads(name: str, parallel: ParallelConfig, model: ModelConfig) -> None:
    size, data_parallel_size = parallel.tensor_parallel_size, parallel.data_parallel_size
    if size not in (sizes := model.tensor_parallel_sizes(data_parallel_size)):
        heads = f"{model.num_heads} heads and {model.num_kv_heads} KV heads"
        if model.experts is not None:
            heads += f" and {model.experts.num_experts} experts"
            if data_parallel_size > 1:
                heads += f" on {data_parallel_size} data-parallel ranks"
        wanted = f"one of {', '.join(map(str, sizes)) or 'no size'} for a model with {heads}"
        raise FieldError(f"{name}.tensor_parallel_size", wanted, size)


def _model(args: DeployArgs) -> tuple[Path, ModelConfig]:
    path = Path(args.model).expanduser() if args.model is not None else bundled_model()
    if not (path / "config.json").is_file():
        raise FieldError("model", "a directory with config.json and safetensors", str(path))
    try:
        return path.absolute(), ModelConfig.from_dir(path)
    except FieldError as error:
        raise FieldError("model", "a checkpoint that Lockstep can serve", str(error)) from None


def _lora_modules(args: DeployArgs) -> tuple[LoraModule, ...]:
    modules: list[LoraModule] = []
    for text in texts(args.lora_modules):
        name, _, path = text.partition("=")
        if not (name and path):
            raise FieldError("lora_modules", "each as name=directory", text)
        directory = Path(path).expanduser().absolute()
        try:
            LoraConfig.from_dir(directory)
        except FieldError as error:
            wanted = "adapters that Lockstep can serve"
            raise FieldError("lora_modules", wanted, str(error)) from None
        modules.append(LoraModule(name, str(directory)))
    if len({module.name for module in modules}) < len(modules):
        raise FieldError("lora_modules", "different names", args.lora_modules)
    return tuple(modules)


def _max_loras(args: DeployArgs, num_modules: int) -> int:
    """Return how many adapters there may be at once, if others may be loaded than those that are
    there from the start; else 0. Refuses what would have no effect."""
    if args.max_loras is not None and args.max_loras < num_modules:
        wanted = f"at least {num_modules}, as many as lora_modules has"
        raise FieldError("max_loras", wanted, args.max_loras)
    room = 0 if args.max_loras is None else args.max_loras - num_modules
    keys = texts(args.admin_keys)
    if room and not keys:
        wanted = "a key for those who may load adapters (max_loras leaves room for some)"
        raise FieldError("admin_keys", wanted, Words("none"))
    if not room:
        why = f"nothing without a max_loras of more than {num_modules}"
        if keys:
            raise FieldError("admin_keys", why, Words("some"))
        if args.max_lora_rank is not None:
            raise FieldError("max_lora_rank", why, args.max_lora_rank)
        return 0
    return num_modules + room


def _adapter_names(engine: EngineConfig, model_names: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(module.name for module in engine.lora_modules)
    for name in names:
        if name in model_names:
            raise FieldError("lora_modules", "names that are not the model's", name)
    return names


def _held_weights(args: DeployArgs, model: ModelConfig, device: str) -> WeightFormat:
    if args.quantization == "w8a8" and device == "cuda":
        raise FieldError("quantization", "another one on a GPU, where w8a8 is not built", "w8a8")
    if args.quantization != "auto":
        return args.quantization
    stored = model.quantization
    return "none" if stored is None or device != "cuda" else stored.own_format


def _max_model_len(args: DeployArgs, model: ModelConfig) -> int:
    limit = model.longest_context
    if args.max_model_len is None:
        return model.max_position_embeddings
    if not 1 <= args.max_model_len <= limit:
        raise FieldError("max_model_len", f"1 to {limit} (the model's)", args.max_model_len)
    return args.max_model_len


def _device(device: str) -> str:
    if device != "auto":
        return device
    # Asking torch would cost two seconds of import on every machine without a GPU.
    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _with_checked_keys(args: DeployArgs) -> DeployArgs:
    """Return arguments whose keys can be used, with the place of their file on this machine."""
    for name in SECRETS:
        check_keys(name, texts(getattr(args, name)))
    if not args.api_keys_file:
        return args
    file = Path(args.api_keys_file).expanduser().absolute()
    read_keys(file)
    return msgspec.structs.replace(args, api_keys_file=str(file))


def _served_names(args: DeployArgs) -> tuple[str, ...]:
    """Return what is asked for, or the path's last component as it was given, even if a link."""
    if args.served_model_name:
        names = texts(args.served_model_name)
        if not names or len(set(names)) < len(names):
            raise FieldError("served_model_name", "different names", args.served_model_name)
        return names
    if args.model is None:
        return (BUNDLED_NAME,)
    return (Path(args.model).expanduser().absolute().name,)


def _kv_hash(content: bytes, pool: PoolConfig) -> str:
    engine = pool.engine
    size = engine.parallel.tensor_parallel_size
    dtypes = (engine.dtype, engine.kv_dtype, engine.quantization)
    return _digest(content, KV_AXES, dtypes, engine.cache.block_size, size, engine.cache.has_mtp)


def _numerics_hash(content: bytes, pools: tuple[PoolConfig, ...]) -> str:
    """Of compilation, what changes generated code counts. Which sizes it is generated and captured
    for does not: a sequence meets all of them, as others come and go."""
    engine = pools[0].engine
    compilations = {
        repr([fields[name] for name in (*KEYED_FIELDS, "compiler")])
        for fields in (pool.engine.compilation.to_dict() for pool in pools)
    }
    dtypes = (engine.dtype, engine.kv_dtype, _weights_of_ranks(engine))
    facts = (engine.device, dtypes, engine.max_model_len, sorted(compilations))
    return _digest(content, NUMERICS_VERSION, *facts)


def _weights_of_ranks(engine: EngineConfig) -> str:
    """Integers and FP8 numbers of a layer whose inputs are split follow from a rank's part; FP4
    ones are the checkpoint's."""
    if engine.quantization in ("none", "nvfp4"):
        return engine.quantization
    return f"{engine.quantization} on {engine.parallel.tensor_parallel_size}"


def _digest(content: bytes, *facts: object) -> str:
    return hashlib.sha256(content + repr(facts).encode()).hexdigest()[:16]
