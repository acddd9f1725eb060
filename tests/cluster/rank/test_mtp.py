"""Drafts of a checkpoint's own layer, in a leader and in the pool that reads what it cached.

That they are what the layer says of whole sequences, however those were computed, the matrix tests
(`tests/cluster/parity`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from local_ranks import RunningLeader, config_of, make_engine, run, tokens_of
from wire_structs import request_of, submit_of

from cluster.config import EngineConfig, SpeculationConfig
from cluster.wire.messages import encode


def drafting(path: Any, num_drafts: int, **sizes: Any) -> EngineConfig:
    config = config_of(path, 128, num_kv_blocks=200, max_num_batched_tokens=64, **sizes)
    cache = replace(config.cache, has_mtp=True)
    return replace(config, cache=cache, speculation=SpeculationConfig(num_drafts))


@pytest.fixture(scope="module")
def foreseen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that says what follows from its last token alone, and whose layer knows that."""
    import transformers
    from mtp import save_with_mtp

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=250,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("foreseen")
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    save_with_mtp(path, model, noise=0.0, volume=0.0, spread=0.0)
    return path


@pytest.mark.feature("T05", "D04")
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_drafts_that_are_right_are_all_accepted_and_counted(foreseen: Any, num_drafts: int) -> None:
    """In steps of as many tokens as a sequence may have, which metrics tell."""
    leader = RunningLeader(drafting(foreseen, num_drafts))
    try:
        num_left = 3
        for i in range(num_left):
            leader.send(encode(submit_of(str(i), [5 + i, 7, 11 * i], max_tokens=41)))
        sizes: list[int] = []
        deadline = time.monotonic() + 300
        while num_left and time.monotonic() < deadline:
            for output in leader.ingress.receive(0.1):
                sizes.append(len(output.token_ids))
                num_left -= bool(output.finish_reason)
        counts = leader.leader.counts()
    finally:
        leader.close()
    assert not num_left
    whole, rest = divmod(40, 1 + num_drafts)
    assert sorted(sizes) == sorted([1, *[1 + num_drafts] * whole, *[rest] * (rest > 0)] * 3)
    num_steps = 3 * (whole + (rest > 1))
    wanted = 3 * (whole * num_drafts + max(rest - 1, 0))
    assert counts["spec_decode_num_drafts_total",] == num_steps
    assert counts["spec_decode_num_draft_tokens_total",] == wanted
    assert counts["spec_decode_num_accepted_tokens_total",] == wanted


@pytest.mark.feature("T05", "T01")
def test_a_cached_block_is_one_whose_last_token_had_the_same_behind_it(
    make_oracle: Callable[[str], Any],
) -> None:
    """What the layer caches for a token follows from the one behind it."""
    oracle = make_oracle("deepseek3 mtp")
    engine = make_engine(drafting(oracle.path, 1))
    head = list(range(100, 112))
    for name, prompt, num_cached in (
        ("first", [*head, 1, 2, 3], 0),
        ("parts at a block's end", [*head[:8], 50, 51, 52], 4),
        ("parts behind it", [*head[:9], 60, 61, 62], 8),
        ("parts there again", [*head[:8], 50, 61, 62], 8),
    ):
        [outputs] = run(engine, [request_of(name, prompt, max_tokens=12)]).values()
        oracle.check_greedy(prompt, tokens_of(outputs))
        assert outputs[0].num_cached_tokens == num_cached, name


@pytest.mark.feature("D04")
def test_what_is_cached_for_drafts_counts_as_kv(make_oracle: Callable[[str], Any]) -> None:
    """A layer more in each block, and blocks of each row's own behind those of all."""
    path = make_oracle("deepseek3 mtp").path
    kv_memory = 1 << 20
    runners = {}
    for num_drafts in (0, 1, 6):
        config = drafting(path, num_drafts or 1)
        if not num_drafts:
            config = replace(config, speculation=None, cache=replace(config.cache, has_mtp=False))
        cache = replace(config.cache, num_kv_blocks=None, kv_memory_bytes=kv_memory)
        scheduler = replace(config.scheduler, max_num_seqs=32)
        config = replace(config, cache=cache, scheduler=scheduler, max_model_len=512)
        runners[num_drafts] = make_engine(config).runner
    layers = {n: runner.kv_spec.num_layers for n, runner in runners.items()}
    assert layers == {0: 2, 1: 3, 6: 3}
    for num_drafts, runner in runners.items():
        own = 32 * 2 if num_drafts == 6 else 0  # 5 tokens behind what is computed, in blocks of 4
        assert runner.kv_pool.shape[0] == runner.num_blocks + own + 1
        assert (
            runner.kv_pool.nbytes <= kv_memory < runner.kv_pool.nbytes + runner.kv_spec.block_bytes
        )
