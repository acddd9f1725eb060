"""Wire structs whose unimportant fields are filled in."""

from __future__ import annotations

from typing import Any

from cluster.wire.group_messages import FollowerHello
from cluster.wire.messages import (
    PROTOCOL_VERSION,
    GenerateRequest,
    KVSource,
    LogitRules,
    RankProcess,
    RowAdmission,
    Sampling,
    StepKind,
    StepPlan,
    Submit,
    Vote,
)

DRAWN = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "num_logprobs": -1}


def sampling_of(**fields: Any) -> Sampling:
    """Return greedy sampling of 8 tokens, with these fields changed."""
    plain = {**DRAWN, "max_tokens": 8, "stop_token_ids": (), "num_prompt_logprobs": -1}
    return Sampling(**{**plain, "rules": None, "grammar": None, **fields})


def request_of(
    request_id: str, prompt: list[int], *, output: list[int] | None = None, **sampling: Any
) -> GenerateRequest:
    sampled = sampling_of(**sampling)
    return GenerateRequest(request_id, prompt, output or [], sampled, b"")


def submit_of(request_id: str, prompt: list[int], **sampling: Any) -> Submit:
    return Submit(request_of(request_id, prompt, **sampling), None)


def rules_of(**fields: Any) -> LogitRules:
    """Return rules that change nothing but by these fields."""
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    others = {"bias_token_ids": (), "biases": (), "allowed_tokens": b"", "min_tokens": 0}
    return LogitRules(**{**penalties, **others, **fields})


def admission_of(row: int, **fields: Any) -> RowAdmission:
    """Return what lets a greedy sequence into a row, with these fields changed."""
    return RowAdmission(row=row, **{**DRAWN, "rules": None, "adapter_place": 0, **fields})


def hello_of(tp_rank: int = 1, **fields: Any) -> FollowerHello:
    """Return what a follower of epoch 1 says first, with these fields changed."""
    source = KVSource(tp_rank, "", 0, -1, "", RankProcess(1, ""))
    known = {"protocol": PROTOCOL_VERSION, "config_hash": "test", "epoch": 1, "nonce": "n"}
    others = {"num_blocks": 9, "layout": "kv", "source": source, "graphs": 0}
    return FollowerHello(tp_rank=tp_rank, **{**known, **others, **fields})


def plan_of(num_new: list[int], **fields: Any) -> StepPlan:
    """Return a step of sequences that compute so many tokens each, in the first rows; all draw."""
    num_seqs, num_tokens = len(num_new), sum(num_new)
    plain = {
        "epoch": 0,
        "step": 1,
        "num_seqs": num_seqs,
        "num_tokens": num_tokens,
        "admitted": [],
        "new_blocks": [],
        "rows": list(range(num_seqs)),
        "num_computed": [0] * num_seqs,
        "num_new": num_new,
        "output_index": [0] * num_seqs,
        "token_ids": [1] * num_tokens,
        "num_decodes": num_new.count(1),
        "num_drafting": 0,
        "prompt_targets": [],
        "known_token_ids": [],
    }
    return StepPlan(**{**plain, **fields})


def vote_of(num_seqs: int, query_len: int = 1, /, **fields: Any) -> Vote:
    """Return the vote of a rank whose sequences compute so many tokens each."""
    plain = {
        "epoch": 0,
        "step": 1,
        "kind": StepKind.DECODE if query_len == 1 else StepKind.MIXED,
        "num_tokens": num_seqs * query_len,
        "num_seqs": num_seqs,
        "max_query_len": query_len,
        "has_work": True,
        "draining": False,
        "stage": 0,
        "can_advance": False,
    }
    return Vote(**{**plain, **fields})
