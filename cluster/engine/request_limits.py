"""What an engine can serve: a request that it could never finish is refused by name. Only what
cannot change while the request is there is asked here. Bounds that hold for every engine stand in
the wire structs' types, and were checked where the request was decoded."""

from __future__ import annotations

import dataclasses
from array import array
from dataclasses import dataclass

import numpy as np

from cluster.config import Role
from cluster.engine.adapters import AdapterSlots
from cluster.engine.blocks import BlockManager
from cluster.engine.sequence import Sequence
from cluster.wire.messages import LogitRules, Sampling


@dataclass(frozen=True)
class RequestLimits:
    """The bounds of one engine. Invariant: a sequence without error would fit into the pool to its
    end if it were alone there, and each of its steps has a token to draw."""

    blocks: BlockManager
    max_model_len: int
    role: Role
    vocab_size: int | None = None
    """Token ids from here on are refused; None takes all (a model would not)."""
    max_prompt_len: int | None = None
    """The longest prompt whose KV the model can compute; None: any."""
    adapters: AdapterSlots = dataclasses.field(default_factory=AdapterSlots)

    def find_error(self, seq: Sequence) -> str:
        """Return what keeps a new sequence from being served, or nothing."""
        return (
            self._find_prompt_error(seq)
            or self._find_length_error(seq)
            or self._find_sampling_error(seq.request.sampling)
            or self._find_adapter_error(seq.request.adapter_id)
        )

    def _find_adapter_error(self, adapter_id: int) -> str:
        if self.adapters.place(adapter_id) is not None:
            return ""
        return f"adapter_id: wanted the id of an adapter that is loaded here, found {adapter_id}"

    def _find_prompt_error(self, seq: Sequence) -> str:
        num_prompt = seq.num_prompt_tokens
        if num_prompt == 0:
            return "prompt_token_ids: wanted at least 1 token, found none"
        if num_prompt >= self.max_model_len:
            wanted = f"at most {self.max_model_len - 1} tokens (max_model_len less one to generate)"
            return f"prompt_token_ids: wanted {wanted}, found {num_prompt}"
        if error := self._find_token_error(seq.token_ids):
            return f"prompt_token_ids: {error}"
        if self.max_prompt_len is not None and num_prompt > self.max_prompt_len:
            wanted = (
                f"at most {self.max_prompt_len} tokens (rope_type dynamic: each longer prompt "
                f"has rotary angles of its own)"
            )
            return f"prompt_token_ids: wanted {wanted}, found {num_prompt}"
        return ""

    def _find_token_error(self, token_ids: list[int]) -> str:
        try:
            packed = array("I", token_ids)
        except OverflowError:  # negative, or beyond any vocabulary
            least, largest = min(token_ids), max(token_ids)
        else:
            # Of a long prompt Python's own would take milliseconds.
            least, largest = 0, int(np.frombuffer(packed, dtype=np.uintc).max())
        if least >= 0 and (self.vocab_size is None or largest < self.vocab_size):
            return ""
        wanted = f"ids from 0 to {self.vocab_size - 1}" if self.vocab_size else "ids from 0 up"
        return f"wanted {wanted}, found {least if least < 0 else largest}"

    def _find_length_error(self, seq: Sequence) -> str:
        # The last token of a sequence is never computed.
        is_prefill = self.role is Role.PREFILL
        longest = max(seq.num_tokens, 0 if is_prefill else seq.max_total_len - 1)
        needed = self.blocks.max_blocks_for(longest)
        if needed <= self.blocks.num_blocks:
            return ""
        wanted = f"at least {needed} for {longest} tokens"
        return f"num_kv_blocks: wanted {wanted}, found {self.blocks.num_blocks}"

    def _find_sampling_error(self, sampling: Sampling) -> str:
        rules, vocab_size = sampling.rules, self.vocab_size
        if rules is not None and len(rules.bias_token_ids) != len(rules.biases):
            wanted = f"{len(rules.bias_token_ids)}, one per token"
            return f"rules.biases: wanted {wanted}, found {len(rules.biases)}"
        if vocab_size is None:
            return ""
        if error := _find_grammar_error(sampling, vocab_size):
            return error
        for field in ("num_logprobs", "num_prompt_logprobs"):
            if (found := getattr(sampling, field)) > vocab_size:
                return f"{field}: wanted at most {vocab_size} (the vocabulary), found {found}"
        if rules is None:
            return ""
        if (largest := max(rules.bias_token_ids, default=0)) >= vocab_size:
            return f"rules.bias_token_ids: wanted ids below {vocab_size}, found {largest}"
        return _find_mask_error(rules, sampling.stop_token_ids, vocab_size)


def _find_grammar_error(sampling: Sampling, vocab_size: int) -> str:
    """Return what keeps a grammar from always having a token to draw, or nothing."""
    grammar, rules = sampling.grammar, sampling.rules
    if grammar is None:
        return ""
    if not grammar.end_token_ids:
        return "grammar.end_token_ids: wanted at least one, found none"
    if (largest := max(grammar.end_token_ids)) >= vocab_size:
        return f"grammar.end_token_ids: wanted ids below {vocab_size}, found {largest}"
    if not set(grammar.end_token_ids) <= set(sampling.stop_token_ids):
        return "grammar.end_token_ids: wanted some of stop_token_ids, found another"
    if rules is not None and (rules.allowed_tokens or rules.min_tokens):
        return "grammar: wanted none with allowed_tokens or min_tokens, found one"
    return ""


def _find_mask_error(rules: LogitRules, stop_token_ids: tuple[int, ...], vocab_size: int) -> str:
    """Return what is wrong with a mask of tokens: one of none leaves nothing to draw from."""
    mask = rules.allowed_tokens
    allowed = int.from_bytes(mask, "little")
    if allowed.bit_length() > vocab_size:
        wanted, found = f"tokens below {vocab_size}", allowed.bit_length() - 1
        return f"rules.allowed_tokens: wanted {wanted}, found {found}"
    if mask and not allowed:
        return "rules.allowed_tokens: wanted at least one token, found none"
    num_allowed = allowed.bit_count() if mask else vocab_size
    num_stops = sum(_is_allowed(mask, stop, vocab_size) for stop in set(stop_token_ids))
    if rules.min_tokens and num_stops == num_allowed:
        return "rules.min_tokens: wanted a token that may come before it, found stop tokens alone"
    return ""


def _is_allowed(mask: bytes, token_id: int, vocab_size: int) -> bool:
    if not mask:
        return token_id < vocab_size
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)
