"""What an engine can serve: a request that it could never finish is refused by name.

The one thing to know: only what cannot change while the engine lives is asked here. Blocks and rows
that are taken now are no reason to refuse; who does not fit yet waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import Role
from cluster.engine.blocks import SCRATCH, BlockManager
from cluster.engine.handoff import HandoffTerms
from cluster.engine.sequence import Sequence
from cluster.messages import KVHandoff


@dataclass(frozen=True)
class RequestLimits:
    """The bounds of one engine.

    Invariant: a sequence without error fits into the pool to its end, were it alone there.
    """

    blocks: BlockManager
    max_model_len: int
    role: Role
    reads: HandoffTerms | None
    """What a ticket must say; None where the engine takes no sequences over."""
    vocab_size: int | None
    """Token ids from here on are refused; None takes all (a model would not)."""
    max_prompt_len: int | None
    """The longest prompt whose KV the model can compute; None: any."""

    def find_error(self, seq: Sequence) -> str:
        """Return what keeps a new sequence from being served, or nothing."""
        error = self._find_prompt_error(seq) or self._find_length_error(seq)
        if error or seq.handoff is None:
            return error
        return self._find_handoff_error(seq, seq.handoff)

    def _find_prompt_error(self, seq: Sequence) -> str:
        num_prompt = seq.num_prompt_tokens
        if num_prompt == 0:
            return "prompt_token_ids: wanted at least 1 token, found none"
        if num_prompt >= self.max_model_len:
            wanted = f"at most {self.max_model_len - 1} tokens (max_model_len less one to generate)"
            return f"prompt_token_ids: wanted {wanted}, found {num_prompt}"
        least, largest = min(seq.token_ids), max(seq.token_ids)
        if least < 0 or (self.vocab_size and largest >= self.vocab_size):
            wanted = f"ids from 0 to {self.vocab_size - 1}" if self.vocab_size else "ids from 0 up"
            return f"prompt_token_ids: wanted {wanted}, found {least if least < 0 else largest}"
        if self.max_prompt_len is not None and num_prompt > self.max_prompt_len:
            wanted = (
                f"at most {self.max_prompt_len} tokens (rope_type dynamic: each longer prompt "
                f"has rotary angles of its own)"
            )
            return f"prompt_token_ids: wanted {wanted}, found {num_prompt}"
        return ""

    def _find_length_error(self, seq: Sequence) -> str:
        # The last token of a sequence is never computed.
        is_prefill = self.role is Role.PREFILL
        longest = max(seq.num_tokens, 0 if is_prefill else seq.max_total_len - 1)
        needed = self.blocks.max_blocks_for(longest)
        if needed <= self.blocks.num_blocks:
            return ""
        wanted = f"at least {needed} for {longest} tokens"
        return f"num_kv_blocks: wanted {wanted}, found {self.blocks.num_blocks}"

    def _find_handoff_error(self, seq: Sequence, handoff: KVHandoff) -> str:
        if self.reads is None:
            return "handoff: wanted none on an engine without KV reader, found one"
        num_tokens = seq.num_tokens - 1
        num_blocks = self.blocks.num_blocks_for(num_tokens)
        error = self.reads.find_error(handoff, num_tokens, num_blocks)
        if not error and SCRATCH in handoff.block_ids[self.blocks.first_needed(num_tokens) :]:
            error = "handoff.block_ids: wanted all blocks of the sliding window, found scratch"
        return error
