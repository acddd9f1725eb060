"""Which logits of a speculating decode step judge which draft token.

A sequence with n drafts computes n + 1 tokens, its last one and the drafts. The logits behind each
of them but the last judge the draft that follows; the last ones are the bonus, what is sampled
where all drafts were right. Names are those of ATOM and vLLM.

Shapes: S sequences, D draft tokens in all. Logits have D + S rows, in the order of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """The drafts of one step.

    Invariant: no sequence has more than `num_spec_steps` drafts; the two index tensors together
    name each row of the logits once.
    """

    draft_token_ids: torch.Tensor
    """int64 [D], sequence by sequence."""
    num_spec_steps: int
    """The most drafts that a sequence can have; a whole graph's query length is one more."""
    num_draft_tokens_np: np.ndarray
    """int64 [S], on the host: grids and loops follow from it without a device sync."""
    cu_num_draft_tokens: torch.Tensor
    """int32 [S]: drafts up to and with each sequence's."""
    target_logits_indices: torch.Tensor
    """int64 [D]: the row that judges each draft."""
    bonus_logits_indices: torch.Tensor
    """int64 [S]: each sequence's last row."""

    @classmethod
    def of(
        cls, drafts: Sequence[Sequence[int]], num_spec_steps: int, device: torch.device
    ) -> SpecDecodeMetadata:
        """Describe a step in which sequence i computes its last token and `drafts[i]`.

        Raises:
            ValueError: a sequence has more drafts than `num_spec_steps`.
        """
        num_drafts = np.array([len(tokens) for tokens in drafts], dtype=np.int64)
        if num_drafts.max(initial=0) > num_spec_steps:
            wanted = f"at most num_spec_steps={num_spec_steps} of a sequence"
            raise ValueError(f"drafts: wanted {wanted}, found {num_drafts.max()}")
        ends = np.cumsum(num_drafts + 1)
        is_target = np.ones(int(ends[-1]) if len(ends) else 0, dtype=bool)
        is_target[ends - 1] = False
        tokens = np.array([token for each in drafts for token in each], dtype=np.int64)
        return cls(
            draft_token_ids=torch.from_numpy(tokens).to(device),
            num_spec_steps=num_spec_steps,
            num_draft_tokens_np=num_drafts,
            cu_num_draft_tokens=torch.from_numpy(np.cumsum(num_drafts).astype(np.int32)).to(device),
            target_logits_indices=torch.from_numpy(np.flatnonzero(is_target)).to(device),
            bonus_logits_indices=torch.from_numpy(ends - 1).to(device),
        )
