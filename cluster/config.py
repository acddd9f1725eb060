"""`EngineConfig`: everything an engine is told, frozen and resolved once. Bounds of single fields
are those of the arguments that they come from; what fields say together is checked here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from compile.config import CompilationConfig
from compile.errors import FieldError
from compile.resolve import StepLimits
from model.quantization import WeightFormat

PLACEMENT_TIMEOUT_S = 30.0
"""How long replicas may wait to be placed before `/ready` says what they lack."""
DEFAULT_NUM_CPUS = 0.01
"""CPU that a rank's bundle asks for: next to nothing, so that the default starts on any machine."""


PlacementStrategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
MIN_LEASE_S = 0.01
"""The shortest lease of KV: a shorter one ends before its reader can renew it."""
MAX_LEASE_S = 86400.0
"""The longest lease of KV."""


class Role(Enum):
    """What an engine does with a sequence after its first token."""

    MIXED = "mixed"
    """Keeps it to the end."""
    PREFILL = "prefill"
    """Holds its KV and hands it over."""
    DECODE = "decode"
    """Keeps it, after it took it over from a prefill engine or computed its prompt."""


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    lockstep: bool = True
    """Whether data-parallel ranks step together; if not, each is on its own."""

    @property
    def lockstep_size(self) -> int:
        return self.data_parallel_size if self.lockstep else 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    num_kv_blocks: int | None = None
    """None: as many as the memory below holds."""
    kv_memory_bytes: int = 1 << 30
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory for weights, activations and KV on a GPU."""
    enable_prefix_caching: bool = True
    dtype: Literal["auto", "fp8"] = "auto"
    """fp8: e4m3, by the checkpoint's scales; auto: as the engine computes."""
    has_mtp: bool = False
    """KV of the checkpoint's MTP layer lies beside the model's: each step runs that layer too, and
    drafts come from it where tokens are drafted."""

    @property
    def num_behind(self) -> int:
        """Tokens behind a token that its KV follows from, too."""
        return int(self.has_mtp)


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    """Tokens of one step: decodes and prefill chunks together."""
    max_step_s: float | None = None
    """How long a step of decodes and prefill chunks together should take; None: any time."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Else a full batch of decodes could not step as one.
            wanted = f"at least max_num_seqs ({self.max_num_seqs})"
            raise FieldError("max_num_batched_tokens", wanted, self.max_num_batched_tokens)


MAX_DRAFT_TOKENS = 64
"""Each takes a row of every graph and of every buffer of what is sampled."""


@dataclass(frozen=True)
class SpeculationConfig:
    """How tokens are drafted, by the names of `speculative_config`."""

    num_speculative_tokens: int
    """Of each sequence in a step, at most."""
    prompt_lookup_max: int = 5
    """The longest run of a sequence's last tokens that is looked for in what it said before."""
    prompt_lookup_min: int = 2
    """The shortest."""

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            wanted = f"at most prompt_lookup_max ({self.prompt_lookup_max})"
            field = "speculative_config.prompt_lookup_min"
            raise FieldError(field, wanted, self.prompt_lookup_min)


@dataclass(frozen=True)
class LoraModule:
    name: str
    """What requests call the model with this adapter."""
    path: str


@dataclass(frozen=True)
class TransferConfig:
    transport: str = "auto"
    """auto: shared memory on one node, TCP between nodes."""
    lease_s: float = 30.0
    """How long a prefill rank holds blocks without hearing from their reader."""

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "shm", "tcp"):
            is_known = self.transport in ("nixl", "object")
            others = " (others are not built yet)" if is_known else ""
            raise FieldError("kv.transport", f"auto, shm or tcp{others}", self.transport)


@dataclass(frozen=True)
class EngineConfig:
    model_path: str
    max_model_len: int
    """Prompt and output tokens of one sequence together."""
    dtype: str = "float32"
    """float32, bfloat16 or float16: of weights and activations."""
    quantization: WeightFormat = "none"
    """What linear layers hold; auto: as `dtype`."""
    device: str = "cpu"
    role: Role = Role.MIXED
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    has_custom_all_reduce: bool = True
    """Whether GPUs of tensor-parallel ranks sum through memory that they map from one another,
    where they can. Equal on all ranks of a group."""
    overlap: bool = False
    """Whether a step is planned while the one before runs. Equal on all ranks of a group."""
    speculation: SpeculationConfig | None = None
    """None: every step computes one token of a sequence that decodes."""
    lora_modules: tuple[LoraModule, ...] = ()
    """Adapters that it starts with; requests name them by their places, from 1 on."""
    max_loras: int = 0
    """Adapters at once, those of `lora_modules` included; the rest are loaded while it serves. 0:
    those alone."""
    max_lora_rank: int = 16
    """The largest rank of an adapter that is loaded while it serves."""
    threads: int | None = 1
    """Of each rank's tensor operations; None: the cores of its node, divided by the ranks there."""
    watchdog_s: float = 10.0
    """How long a rank may stay in one phase of a step before its group is rebuilt; longer if
    steps of that size have taken a fifth of it."""
    log_format: str = "text"
    kv_hash: str = ""
    """Engines with an equal one may read each other's KV."""

    def __post_init__(self) -> None:
        if self.device == "cuda" and self.transfer.transport == "shm":
            wanted = "auto or tcp with device=cuda, whose KV is no host memory"
            raise FieldError("kv.transport", wanted, self.transfer.transport)
        if 0 < self.max_loras < len(self.lora_modules):
            wanted = f"at least {len(self.lora_modules)}, those of lora_modules, or 0"
            raise FieldError("max_loras", wanted, self.max_loras)
        if self.overlap and self.speculation is not None:
            wanted = "auto or off with speculative_config (a draft follows from the last token)"
            raise FieldError("overlap", wanted, "on")

    @property
    def query_len(self) -> int:
        """Tokens that a sequence which decodes has in a step, at most."""
        return 1 + (self.speculation.num_speculative_tokens if self.speculation else 0)

    @property
    def draft_blocks(self) -> int:
        """Blocks that each row has for itself: a draft's KV behind all that is computed lies there,
        where the MTP layer drafts from its own drafts."""
        num_drafts = self.query_len - 1 if self.cache.has_mtp else 0
        return -(-max(num_drafts - 1, 0) // self.cache.block_size)

    @property
    def lora_paths(self) -> list[str]:
        return [module.path for module in self.lora_modules]

    @property
    def num_lora_slots(self) -> int:
        """Adapters that ranks have room for."""
        return max(self.max_loras, len(self.lora_modules))

    @property
    def step_limits(self) -> StepLimits:
        """What the compiler has to know of steps."""
        limits = self.scheduler
        return StepLimits(limits.max_num_seqs, limits.max_num_batched_tokens, self.query_len)

    @property
    def kv_dtype(self) -> str:
        """What KV is held in, as torch names it."""
        return "float8_e4m3fn" if self.cache.dtype == "fp8" else self.dtype

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.cache.block_size)


@dataclass(frozen=True)
class Placement:
    """What each rank of a group reserves in Ray, and on which nodes."""

    num_cpus: float = DEFAULT_NUM_CPUS
    num_gpus: float = 0.0
    accelerator_type: str | None = None
    label_selector: dict[str, str] = field(default_factory=dict)
    strategy: PlacementStrategy = "STRICT_PACK"
    """Of all bundles of a group: tensor-parallel ranks on two nodes would wait for the network in
    every layer."""
    is_single_node: bool = False
    """The cluster has no node but one."""

    @property
    def bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.num_cpus}
        if self.num_gpus:
            bundle["GPU"] = self.num_gpus
        if self.accelerator_type is not None:
            # What Ray makes of an actor's `accelerator_type`: nodes have 1 of it.
            bundle[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return bundle

    def bundles(self, parallel: ParallelConfig) -> list[dict[str, float]]:
        """Return one bundle for each rank of a group."""
        return [self.bundle for _ in range(parallel.world_size)]
