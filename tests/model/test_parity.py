"""Logits against transformers, on tiny random models of awkward shapes, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.kernels import latent_attention
from model.parallel import Shard
from model.weights import load_model

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_kv_head": {"num_key_value_heads": 1},
    "six_heads_of_ten": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    "own_head_dim": {"head_dim": 20, "rope_theta": 500000.0},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "mistral": {"family": "Mistral", "sliding_window": 5, "num_key_value_heads": 4},
    "qwen2": {
        "family": "Qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "family": "Qwen3",
        "head_dim": 20,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
}


def mixtral(num_experts: int, top_k: int = 2, **others: Any) -> dict[str, Any]:
    sizes = {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
    return {"family": "Mixtral", **sizes, **others}


def qwen3_moe(num_experts: int, top_k: int, size: int, **others: Any) -> dict[str, Any]:
    sizes = {"num_experts": num_experts, "num_experts_per_tok": top_k}
    return {"family": "Qwen3Moe", "moe_intermediate_size": size, **sizes, **others}


# Numbers of experts are no powers of two, and sizes are such that no two are alike.
SHAPES |= {
    "mixtral": mixtral(5),
    "mixtral of one expert": mixtral(1, 1),
    "mixtral that asks all": mixtral(3, 3),
    "mixtral window": mixtral(4, sliding_window=5, num_key_value_heads=4),
    "mixtral wide heads": mixtral(6, head_dim=20, intermediate_size=37),
    "mixtral tied": mixtral(7, 4, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3_moe": qwen3_moe(6, 3, 20),
    "qwen3_moe normalised": qwen3_moe(5, 2, 9, norm_topk_prob=True, head_dim=20),
    "qwen3_moe of many": qwen3_moe(33, 8, 6, attention_bias=True),
    "qwen3_moe every other layer": qwen3_moe(
        4, 1, 30, decoder_sparse_step=2, num_hidden_layers=4, norm_topk_prob=True
    ),
    "qwen3_moe with dense layers": qwen3_moe(
        3, 2, 50, mlp_only_layers=[0, 2], num_hidden_layers=3, tie_word_embeddings=True
    ),
    "qwen3_moe window": qwen3_moe(8, 2, 24, use_sliding_window=True, sliding_window=6),
}


def deepseek(version: int, num_experts: int, top_k: int, **others: Any) -> dict[str, Any]:
    """No two sizes are alike, factors of the scaling differ, and prompts are longer than what
    positions were made for."""
    sizes = {"n_routed_experts": num_experts, "num_experts_per_tok": top_k, "n_shared_experts": 2}
    heads = {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "kv_lora_rank": 20}
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
    return {
        "family": f"DeepseekV{version}",
        "num_key_value_heads": 4,
        "q_lora_rank": 22,
        "moe_intermediate_size": 18,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "rope_parameters": rope | {"mscale": 0.7, "mscale_all_dim": 1.2, "rope_theta": 300.0},
        **sizes,
        **heads,
        **others,
    }


SHAPES |= {
    "deepseek_v2": deepseek(2, 7, 3, q_lora_rank=None, attention_bias=True, rms_norm_eps=1e-4),
    "deepseek_v2 in groups": deepseek(
        2,
        12,
        3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,  # which transformers does not look at
        routed_scaling_factor=1.7,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "deepseek_v3": deepseek(
        3, 12, 3, n_group=3, topk_group=2, attention_bias=True, rms_norm_eps=1e-3
    ),
    "deepseek_v3 of one group": deepseek(
        3, 5, 4, n_group=1, topk_group=1, q_lora_rank=None, first_k_dense_replace=0
    ),
    "deepseek_v3 that asks all": deepseek(3, 4, 4, n_group=2, topk_group=2),
    "deepseek_v3 not normalised": deepseek(
        3,
        16,
        4,
        n_group=4,
        topk_group=3,
        norm_topk_prob=False,
        n_shared_experts=1,
        rope_interleave=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0, "mscale_all_dim": 1.2},
    ),
}


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 509, (length,), generator=torch.Generator().manual_seed(seed))


def expected(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(ids[None]).logits[0]
    return logits


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # Logits reach 10 to 30 here, so an absolute 1e-4 alone is within float32's rounding.
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.feature("S07", "S04")
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batches_equal_transformers(
    shape: str, make_checkpoint: Any, load: Any, paged: Any
) -> None:
    path, reference = make_checkpoint(**SHAPES[shape])
    runner = paged(load(path)[0])
    ids = {name: prompt(30, seed) for seed, name in enumerate("abcd")}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    # Each step: how many tokens of which sequence. Decodes stand beside first and later chunks.
    steps = [
        {"a": 9, "b": 3},
        {"a": 1, "b": 5, "c": 12},
        {"a": 1, "b": 1, "c": 7, "d": 2},
        {"a": 1, "b": 1, "c": 1, "d": 1},
        {"a": 18, "b": 20, "c": 10, "d": 27},
    ]
    for counts in steps:
        done = {name: runner.lengths.get(name, 0) for name in ids}
        chunks = {name: ids[name][done[name] :][:n] for name, n in counts.items()}
        for name, found in runner.step(chunks).items():
            logits[name].append(found)
    for name, parts in logits.items():
        assert_close(torch.cat(parts), expected(reference, ids[name]))


@pytest.mark.feature("S04")
@pytest.mark.parametrize(("chunk", "queries"), [(4, 3), (13, 100), (8, 4)])
def test_latents_of_a_long_context_are_attended_part_by_part(
    chunk: int,
    queries: int,
    make_checkpoint: Any,
    load: Any,
    paged: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent_attention, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(latent_attention, "CHUNK_QUERIES", queries)
    path, reference = make_checkpoint(**SHAPES["deepseek_v3"])
    runner, ids = paged(load(path)[0]), prompt(60)
    parts = [runner.step({"a": ids[:26]}), runner.step({"a": ids[26:27]})]
    parts += [runner.step({"a": ids[27:52]}), runner.step({"a": ids[52:]})]
    assert_close(torch.cat([part["a"] for part in parts]), expected(reference, ids))


# Where not all experts are asked, a rounded score may choose another one, and nothing is close.
@pytest.mark.parametrize("shape", ["tied", "mixtral that asks all", "deepseek_v3 that asks all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_transformers(
    dtype: torch.dtype, shape: str, make_checkpoint: Any, paged: Any
) -> None:
    path, reference = make_checkpoint(**SHAPES[shape])
    model, _ = load_model(path, dtype=dtype, device="cpu")
    ids = prompt(33)
    found = paged(model, dtype=dtype).step({"a": ids})["a"]
    wanted = expected(reference, ids)
    error = (found - wanted).abs().mean() / wanted.abs().mean()
    assert found.dtype == torch.float32
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "shape",
    [
        "plain",
        "one_kv_head",
        "tied",
        "biases",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral window",
        "qwen3_moe every other layer",
        "deepseek_v2 in groups",
        "deepseek_v3",
    ],
)
def test_tensor_parallel_equals_one_rank(
    shape: str, size: int, make_checkpoint: Any, load: Any, paged: Any, run_ranks: Any
) -> None:
    path, reference = make_checkpoint(**SHAPES[shape])
    ids = {"a": prompt(11), "b": prompt(17, 1)}

    def work(shard: Shard) -> dict[str, torch.Tensor]:
        runner = paged(load(path, shard)[0])
        first = runner.step(ids)
        second = runner.step({"a": prompt(1, 2), "b": prompt(3, 3)})
        return {name: torch.cat((first[name], second[name])) for name in first}

    wanted = {
        "a": expected(reference, torch.cat((ids["a"], prompt(1, 2)))),
        "b": expected(reference, torch.cat((ids["b"], prompt(3, 3)))),
    }
    found, *others = run_ranks(size, work)
    for name, logits in wanted.items():
        assert_close(found[name], logits)
    assert others == [{}] * (size - 1)
