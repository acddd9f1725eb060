"""Random checkpoints, a small runner over a paged cache, and tensor-parallel ranks in threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from cluster.group.membership import make_group
from compile.context import ForwardContext, forward_context
from model.config import ModelConfig
from model.kernels import dispatch
from model.kv_cache import KVCacheSpec
from model.layers.attention import AttentionMetadata
from model.layers.decoder import CausalLM
from model.parallel import Shard
from model.quantization import WeightFormat
from model.weights import load_model

sys.path.append(str(Path(__file__).parent / "checkpoints"))  # of quantized weights

SMALL: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # So wide that outputs of different prompts differ.
    "initializer_range": 0.3,
}

# One padding token: its id, position and slot.
PAD = (torch.tensor([1]), torch.tensor([3]), torch.tensor([0]))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def _randomise(model: torch.nn.Module) -> None:
    """Give biases and norm weights values too: transformers starts them at zero and one."""
    for name, values in model.state_dict().items():
        if values.ndim == 1:
            torch.nn.init.normal_(values, 1.0 if "norm" in name else 0.0, 0.3)


@pytest.fixture(scope="session")
def make_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Path, transformers.PreTrainedModel]]:
    """Return a function from configuration overrides to (directory, transformers' model)."""
    made: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}

    def make(
        max_shard_size: str = "5GB", family: str = "Llama", **overrides: Any
    ) -> tuple[Path, transformers.PreTrainedModel]:
        key = repr((max_shard_size, family, sorted(overrides.items())))
        if key not in made:
            torch.manual_seed(0)
            config = getattr(transformers, f"{family}Config")(**(SMALL | overrides))
            reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            if hasattr(config, "num_experts_per_tok"):
                # What it chooses by itself takes multiples of 16 bytes alone.
                reference.set_experts_implementation("eager")
            with torch.no_grad():
                _randomise(reference)
            directory = tmp_path_factory.mktemp("checkpoint")
            reference.save_pretrained(directory, max_shard_size=max_shard_size)
            made[key] = directory, reference
        return made[key]

    return make


class Paged:
    """Runs a model over a paged cache whose blocks are handed out in shuffled order.

    Every slot that a sequence has not written holds NaN until a block is opened, so reading one
    shows in the output.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.watch: AbstractContextManager[Any] = nullcontext()
        """Around each forward."""
        self.layers = model.attention_layers()
        first = next(iter(self.layers.values()))
        kind = (first.num_kv_heads, first.head_dim, block_size, dtype, first.has_values)
        spec = KVCacheSpec(len(self.layers), *kind)
        self.pool = spec.allocate(num_blocks, torch.device("cpu"))
        self.pool[1:] = torch.nan
        self.caches = spec.views(self.pool, list(self.layers))
        self.block_size = block_size
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self.free = (order + 1).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(
        self,
        chunks: dict[str, torch.Tensor],
        *,
        num_padding_decodes: int = 0,
        num_padding_tokens: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Append each sequence's tokens in one forward; return logits [n, V] of each on rank 0."""
        decodes = [name for name in chunks if len(chunks[name]) == 1]
        prefills = [name for name in chunks if len(chunks[name]) > 1]
        pads = [f"pad{i}" for i in range(num_padding_decodes)]
        names = decodes + pads + prefills
        rows = [self._append(name, chunks[name]) if name in chunks else PAD for name in names]
        tokens, positions, slots = (
            torch.cat([row[i] for row in rows] + [column] * num_padding_tokens)
            for i, column in enumerate(PAD)
        )
        bounds = torch.tensor([0] + [len(row[0]) for row in rows]).cumsum(0)
        metadata = AttentionMetadata(
            num_decodes=len(decodes) + len(pads),
            cu_seqlens_q=bounds.int(),
            seq_lens=torch.tensor([self.lengths.get(name, 0) for name in names]).int(),
            block_table=self._block_table(names),
            slot_mapping=slots,
        )
        logits = self._forward(tokens, positions, metadata)
        if logits is None:
            return {}
        return {name: logits[bounds[i] : bounds[i + 1]] for i, name in enumerate(names)}

    def _append(self, name: str, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give a sequence blocks for more tokens; return tokens, positions and slots."""
        start = self.lengths.get(name, 0)
        self.lengths[name] = stop = start + len(tokens)
        table = self.tables.setdefault(name, [])
        while len(table) * self.block_size < stop:
            table.append(self.free.pop())
        positions = torch.arange(start, stop)
        blocks = torch.tensor(table)[positions // self.block_size]
        return tokens, positions, blocks * self.block_size + positions % self.block_size

    def _block_table(self, names: list[str]) -> torch.Tensor:
        columns = max(len(table) for table in self.tables.values()) + 1
        # Entries behind a sequence's length mean nothing: fill them with a block of NaN.
        filled = torch.full((len(names), columns), self.free[0], dtype=torch.int32)
        for row, name in zip(filled, names, strict=True):
            table = self.tables.get(name, [])
            row[: len(table)] = torch.tensor(table)
        return filled

    @torch.inference_mode()
    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor | None:
        context = ForwardContext(self.layers, metadata, self.caches)
        with forward_context(context), self.watch:
            hidden = self.model(tokens, positions)
        assert hidden.isfinite().all()
        return self.model.compute_logits(hidden)


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    """The runner's class."""
    return Paged


@pytest.fixture
def torch_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that nothing traces call the functions that tracing sees: results equal to the bit."""
    monkeypatch.setattr(dispatch, "uses_ops", lambda _: False)


def _run_grid(dp_size: int, tp_size: int, work: Callable[[Shard], Any]) -> list[list[Any]]:
    store = dist.HashStore()
    # One that ends would break the connections of a rank that is still making them.
    groups: list[dist.ProcessGroup] = []

    def group(name: str, rank: int, size: int) -> dist.ProcessGroup | None:
        if size == 1:
            return None
        found = make_group(
            dist.PrefixStore(name, store), rank, size, device="cpu", host="127.0.0.1"
        )
        groups.append(found)
        return found

    def run(place: tuple[int, int]) -> Any:
        dp_rank, tp_rank = place
        data = Shard(dp_rank, dp_size, group(f"dp of {tp_rank}", dp_rank, dp_size), kind="dp")
        tensor = group(f"tp of {dp_rank}", tp_rank, tp_size)
        return work(Shard(tp_rank, tp_size, tensor, data=data))

    places = [(dp_rank, tp_rank) for dp_rank in range(dp_size) for tp_rank in range(tp_size)]
    with ThreadPoolExecutor(len(places)) as threads:
        found = list(threads.map(run, places))
    return [found[first : first + tp_size] for first in range(0, len(found), tp_size)]


@pytest.fixture(scope="session")
def run_grid() -> Callable[[int, int, Callable[[Shard], Any]], list[list[Any]]]:
    """Run a function of a shard on data-parallel times tensor-parallel ranks, all of them threads
    joined by gloo; return results [DP][TP]."""
    return _run_grid


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[Shard], Any]], list[Any]]:
    """Run a function of a shard on tensor-parallel ranks; return its results."""

    def run(size: int, work: Callable[[Shard], Any]) -> list[Any]:
        return _run_grid(1, size, lambda shard: work(replace(shard, data=None)))[0]

    return run


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay as they are read."""
    for layers in ("linear", "moe"):
        monkeypatch.setattr(f"model.layers.{layers}.can_pack", lambda *_: False)


@pytest.fixture(scope="session")
def load() -> Callable[..., tuple[CausalLM, ModelConfig]]:
    """Load a checkpoint in float32 on the CPU."""

    def load_float32(path: Path, shard: Shard | None = None, held: WeightFormat = "none") -> Any:
        shard = shard or Shard()
        return load_model(path, shard=shard, dtype=torch.float32, device="cpu", quantization=held)

    return load_float32
