"""The model parts of gpu_check.py: random models against transformers, and timed decode steps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_check_rows import Row, Setting, captured, error_of

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.engine.lockstep import AloneLockstep
from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import NewBlocks, RowAdmission, StepPlan
from compile.context import ForwardContext, forward_context
from model.config import ModelConfig
from model.kv_cache import KVCacheSpec
from model.layers.attention import AttentionMetadata
from model.layers.decoder import CausalLM
from model.parallel import Placement
from model.weights import load_model

BLOCK_SIZE = 16


def checkpoint_config(at: Setting, *, large: bool = False) -> dict[str, Any]:
    """Return a Llama-shaped configuration: small enough to compare, or of a billion weights."""
    sizes = {
        "hidden_size": at.pick(2048 if large else 1024, 128),
        "intermediate_size": at.pick(8192 if large else 2816, 256),
        "num_hidden_layers": at.pick(16 if large else 8, 2),
        "num_attention_heads": at.pick(32 if large else 16, 4),
        "num_key_value_heads": at.pick(8 if large else 4, 2),
        "vocab_size": at.pick(128256 if large else 8192, 512),
    }
    return {**sizes, "max_position_embeddings": 4096, "initializer_range": 0.05}


def save_random_checkpoint(at: Setting, folder: Path) -> Any:
    """Write a random checkpoint and return transformers' model of it in float32."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**checkpoint_config(at), eos_token_id=None)
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(folder)
    return reference.to(at.device)


def save_random_moe(at: Setting, folder: Path) -> None:
    """Write a random checkpoint in bfloat16 whose layers have experts."""
    import transformers

    torch.manual_seed(0)
    experts = {
        "num_experts": at.pick(64, 4),
        "num_experts_per_tok": at.pick(8, 2),
        "moe_intermediate_size": at.pick(768, 64),
        "head_dim": at.pick(64, 32),
    }
    config = transformers.Qwen3MoeConfig(**checkpoint_config(at), **experts, eos_token_id=None)
    with at.device:
        model = transformers.Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def save_random_qwen3(at: Setting, folder: Path) -> None:
    """Write a random checkpoint in bfloat16, of the shape of Qwen3-0.6B where there is room."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=at.pick(1024, 128),
        intermediate_size=at.pick(3072, 256),
        num_hidden_layers=at.pick(28, 2),
        num_attention_heads=at.pick(16, 4),
        num_key_value_heads=at.pick(8, 2),
        head_dim=at.pick(128, 32),
        vocab_size=at.pick(151936, 512),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    with at.device:
        model = transformers.Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def save_random_mtp(at: Setting, folder: Path) -> None:
    """Write a random DeepSeek-V3 checkpoint whose last layer predicts a token more."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": at.pick(16, 4)}
    config = transformers.DeepseekV3Config(
        **checkpoint_config(at) | sizes,
        kv_lora_rank=at.pick(512, 64),
        q_lora_rank=at.pick(256, 64),
        qk_nope_head_dim=at.pick(128, 32),
        qk_rope_head_dim=at.pick(64, 32),
        v_head_dim=at.pick(128, 32),
        n_routed_experts=at.pick(16, 4),
        num_experts_per_tok=at.pick(4, 2),
        moe_intermediate_size=at.pick(256, 64),
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        eos_token_id=None,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    model.save_pretrained(folder)
    file, hidden = folder / "model.safetensors", config.hidden_size
    layer = f"model.layers.{config.num_hidden_layers - 1}"
    added = {f"{layer}.eh_proj.weight": torch.randn(hidden, 2 * hidden) / (2 * hidden) ** 0.5}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{layer}.{norm}.weight"] = torch.ones(hidden)
    save_file(load_file(file) | added, file)
    published = json.loads((folder / "config.json").read_text())
    published["num_hidden_layers"] -= 1
    published["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(published))


@dataclass
class Session:
    """A model over a paged cache, with one row of the block table per sequence."""

    model: CausalLM
    dtype: torch.dtype
    device: torch.device
    num_seqs: int
    max_len: int

    def __post_init__(self) -> None:
        self.layers = self.model.attention_layers()
        first = next(iter(self.layers.values()))
        spec = KVCacheSpec(
            len(self.layers), first.num_kv_heads, first.head_dim, BLOCK_SIZE, self.dtype
        )
        columns = -(-self.max_len // BLOCK_SIZE)
        pool = spec.allocate(self.num_seqs * columns, self.device)
        self.block_bytes = spec.block_bytes
        self.caches = spec.views(pool, list(self.layers))
        blocks = torch.arange(1, self.num_seqs * columns + 1, dtype=torch.int32)
        self.table = blocks.view(self.num_seqs, columns).to(self.device)

    def context(self, done: list[int], new: list[int]) -> tuple[ForwardContext, torch.Tensor]:
        """Return the context and the positions of a step in which decodes stand first."""
        at = [torch.arange(n, n + m, device=self.device) for n, m in zip(done, new, strict=True)]
        blocks = [row[p // BLOCK_SIZE] for row, p in zip(self.table, at, strict=False)]
        positions = torch.cat(at)
        metadata = AttentionMetadata(
            num_decodes=new.count(1),
            cu_seqlens_q=torch.tensor([0, *new], device=self.device).cumsum(0).int(),
            seq_lens=(torch.tensor(done) + torch.tensor(new)).int().to(self.device),
            block_table=self.table[: len(new)],
            slot_mapping=torch.cat(blocks).long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        )
        return ForwardContext(self.layers, metadata, self.caches), positions

    def step(self, done: list[int], new: list[int], ids: torch.Tensor) -> torch.Tensor:
        """Give each sequence `new` tokens behind its first `done`; return the tokens' logits."""
        context, positions = self.context(done, new)
        with forward_context(context):
            logits = self.model.compute_logits(self.model(ids, positions))
        assert logits is not None
        return logits


def part_model(at: Setting) -> Iterator[Row]:
    """A random model in chunks and decodes against transformers on the same device.

    In bfloat16 both are compared with transformers in float32: ours may be twice as far away.
    """
    lengths, steps = [70, 33, 90], [[40, 0, 0], [30, 20, 0], [0, 12, 60], [0, 1, 30]]
    with tempfile.TemporaryDirectory() as name:
        reference = save_random_checkpoint(at, Path(name))
        ids = torch.randint(0, reference.config.vocab_size, (3, max(lengths)), device=at.device)
        wanted = [reference(row[None, :n]).logits[0] for row, n in zip(ids, lengths, strict=True)]
        half = in_bfloat16(reference)
        theirs = [half(row[None, :n]).logits[0] for row, n in zip(ids, lengths, strict=True)]
        for dtype, limit in (
            (torch.float32, 1e-3),
            (torch.bfloat16, 2 * error_of(torch.cat(theirs), torch.cat(wanted))),
        ):
            model, _ = load_model(name, dtype=dtype, device=at.device)
            session = Session(model, dtype, at.device, 3, max(lengths))
            found = run_steps(session, steps, ids)
            error = error_of(torch.cat(found), torch.cat(wanted))
            yield Row(f"logits against transformers, {dtype}", error=error, limit=limit)


def in_bfloat16(reference: Any) -> Any:
    """Turn transformers' weights to bfloat16; frequencies of positions stay in float32, as ours."""
    frequencies = reference.model.rotary_emb.inv_freq.clone()
    half = reference.to(torch.bfloat16)
    half.model.rotary_emb.inv_freq = frequencies
    return half


def run_steps(session: Session, steps: list[list[int]], ids: torch.Tensor) -> list[torch.Tensor]:
    """Run mixed steps, one entry per sequence and step; return each sequence's logits."""
    whole = session.table
    done = [0] * len(steps[0])
    logits: list[list[torch.Tensor]] = [[] for _ in done]
    for counts in steps:
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: counts[i] > 1)
        session.table = whole[order]
        new = [counts[i] for i in order]
        tokens = torch.cat([ids[i, done[i] : done[i] + counts[i]] for i in order])
        found = session.step([done[i] for i in order], new, tokens).split(new)
        for i, rows in zip(order, found, strict=True):
            logits[i].append(rows)
            done[i] += counts[i]
    return [torch.cat(rows) for rows in logits]


def part_runner(at: Setting) -> Iterator[Row]:
    """Greedy tokens of the engine's runner against transformers, float32, teacher-forced."""
    num_seqs, prompt, steps = 4, 37, at.pick(32, 8)
    columns = -(-(prompt + steps) // BLOCK_SIZE)
    with tempfile.TemporaryDirectory() as name:
        reference = save_random_checkpoint(at, Path(name))
        ids = torch.randint(0, reference.config.vocab_size, (num_seqs, prompt), device=at.device)
        limits = {"max_new_tokens": steps, "min_new_tokens": steps}
        wanted = reference.generate(ids, do_sample=False, pad_token_id=0, **limits).tolist()
        config = EngineConfig(
            model_path=name,
            max_model_len=columns * BLOCK_SIZE,
            device=at.device.type,
            cache=CacheConfig(BLOCK_SIZE, num_kv_blocks=num_seqs * columns),
            scheduler=SchedulerConfig(max_num_seqs=num_seqs),
        )
        runner = ModelRunner(RankContext(config))
    num_wrong = 0
    for step in range(steps):
        done, new = (prompt + step - 1, 1) if step else (0, prompt)
        blocks = [list(range(1 + i * columns, 1 + (i + 1) * columns)) for i in range(num_seqs)]
        plan = StepPlan(
            epoch=0,
            step=step,
            num_seqs=num_seqs,
            num_tokens=num_seqs * new,
            admitted=[]
            if step
            else [RowAdmission(i, 0.0, 0, 1.0, 0.0, 0, -1, None, 0) for i in range(num_seqs)],
            new_blocks=[] if step else [NewBlocks(i, 0, b) for i, b in enumerate(blocks)],
            rows=list(range(num_seqs)),
            num_computed=[done] * num_seqs,
            num_new=[new] * num_seqs,
            output_index=[step] * num_seqs,
            token_ids=[token for row in wanted for token in row[done : done + new]],
            num_decodes=num_seqs if step else 0,
            num_drafting=0,
            prompt_targets=[],
            known_token_ids=[],
        )
        drawn = runner.execute(plan, AloneLockstep().agree(plan.vote())).token_ids
        num_wrong += sum(a != row[done + new] for a, row in zip(drawn, wanted, strict=True))
    yield Row(
        "greedy tokens against transformers, float32",
        error=num_wrong / (num_seqs * steps),
        # A near-tie may flip with another order of summation.
        limit=0.02,
        note=f"{num_wrong} of {num_seqs * steps} differ",
    )


def random_model(at: Setting) -> CausalLM:
    """Return a random model in bfloat16, made on the device."""
    with tempfile.TemporaryDirectory() as name:
        config = {"architectures": ["LlamaForCausalLM"], **checkpoint_config(at, large=True)}
        (Path(name) / "config.json").write_text(json.dumps(config))
        model_config = ModelConfig.from_dir(name)
    model = CausalLM(model_config, Placement(torch.bfloat16, at.device))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = 0.02 * at.randn(*parameter.shape)
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    return model.eval()


def part_step(at: Setting) -> Iterator[Row]:
    """Decode steps of a whole model, eager and, on a GPU, replayed from a graph."""
    model, context_len = random_model(at), at.pick(1024, 64)
    embedding = model.model.embed_tokens.weight
    weight_bytes = sum(p.nbytes for p in model.parameters()) - embedding.nbytes
    for num_seqs in (1, at.pick(16, 2), at.pick(64, 4)):
        session = Session(model, torch.bfloat16, at.device, num_seqs, context_len)
        ids = torch.randint(0, embedding.shape[0], (num_seqs,), device=at.device)
        context, positions = session.context([context_len - 1] * num_seqs, [1] * num_seqs)

        def step(
            context: Any = context, ids: Any = ids, positions: Any = positions
        ) -> torch.Tensor:
            with forward_context(context):
                logits = model.compute_logits(model(ids, positions))
            assert logits is not None
            return logits

        num_blocks = num_seqs * -(-context_len // BLOCK_SIZE)
        num_bytes = weight_bytes + num_blocks * session.block_bytes
        eager = step().clone()
        row = Row(f"decode step, eager: {num_seqs} x {context_len}", num_bytes=num_bytes)
        row.seconds = at.time(step)
        yield row
        if at.device.type == "cuda":
            graph, replayed = captured(step)
            row = Row(f"decode step, graph: {num_seqs} x {context_len}", num_bytes=num_bytes)
            graph.replay()
            row.error, row.limit = error_of(replayed, eager), 1e-2
            row.seconds = at.time(graph.replay)
            yield row
