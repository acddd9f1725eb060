"""The rows' logit rules, with the tables on the device that they need.

A row is admitted with the tokens that are computed already, each plan brings those that it
computes, and before a token is drawn both are counted: after a pre-emption, a resume elsewhere or a
handoff the counts are those of an uninterrupted run. What a draft says counts for the draws behind
it alone, until the row's next plan shows how much of it was right. Tables are allocated when the
first row wants them. Stop tokens outside of the vocabulary are left out: an index outside of a
table would end the rank.

Shapes: R rows, V vocabulary, B sampled rows, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from cluster.rank.buffers import Staging, StaticBuffer, upload_array, upload_once
from cluster.wire.messages import LogitRules, RowAdmission, RowRules, StepPlan
from model.sampler import Adjustments, Penalties

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Counted:
    places: torch.Tensor
    """int64 [C, 2]: where in the step each lies, and its row."""
    num_output: int
    """The first ones are output, the others prompt."""
    accepted: list[tuple[int, int]]
    """Rows and their tokens of earlier drafts that were right."""


class RowRulesTables:
    """Logit rules of all rows. Invariant: a row without a rule has bias 0, no stop tokens to mask
    and penalties that change nothing; only rows with penalties have true counts."""

    def __init__(
        self, rows: int, tokens: int, num_sampled: int, vocab_size: int, staging: Staging
    ) -> None:
        self._shape = (rows, vocab_size)
        self._device = staging.device
        self.num_rows = 0
        self._drafts: dict[int, tuple[int, list[int]]] = {}
        """By row with penalties: where the draft of its last step began, and what it said."""
        self._has_rules = np.zeros(rows, dtype=bool)
        self._has_bias = np.zeros(rows, dtype=bool)
        self._has_penalties = np.zeros(rows, dtype=bool)
        self._min_tokens = np.zeros(rows, dtype=np.int64)
        self._num_prompt = np.zeros(rows, dtype=np.int64)
        self._row_penalties = np.tile(np.array(_NO_PENALTIES, dtype=np.float32), (rows, 1))
        self._bias: torch.Tensor | None = None
        self._is_stop: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._is_in_prompt: torch.Tensor | None = None
        # The longest first: what the others fill then lies close to what follows them.
        self._counted = StaticBuffer((tokens, 2), torch.int64, staging)
        self._rows = StaticBuffer((num_sampled,), torch.int64, staging)
        self._is_before_min = StaticBuffer((num_sampled,), torch.bool, staging)
        self._penalties = StaticBuffer((num_sampled, 3), torch.float32, staging)

    def admit(self, admission: RowAdmission) -> None:
        row, found = admission.row, admission.rules
        if self._has_rules[row]:
            self._clear(row)
        if found is None:
            return
        rules = found.rules
        self._has_rules[row] = True
        self.num_rows += 1
        self._num_prompt[row] = found.num_prompt_tokens
        self._min_tokens[row] = rules.min_tokens
        if rules.biases or rules.allowed_tokens:
            self._set_bias(row, rules)
        if rules.min_tokens:
            self._set_stop(row, found.stop_token_ids)
        if rules.has_penalties:
            self._set_penalties(row, found)

    def stage_counted(self, plan: StepPlan, rows: Ints, positions: Ints) -> Counted | None:
        """Stage which tokens of a step `count` counts: those in rows with penalties.

        rows: [S], the plan's; positions: [T], of the tokens in their sequences.
        """
        if not self._has_penalties[rows].any():
            return None
        token_rows = rows if len(rows) == len(positions) else np.repeat(rows, plan.num_new)
        is_counted = self._has_penalties[token_rows]
        accepted = self._take_accepted(plan) if self._drafts else []
        for i, place, draft in plan.drafts():
            is_counted[place : place + len(draft)] = False
            if self._has_penalties[row := plan.rows[i]]:
                self._drafts[row] = plan.num_computed[i] + 1, draft
        index = np.flatnonzero(is_counted)
        is_output = positions[index] >= self._num_prompt[token_rows[index]]
        # Output first: then each kind is one stretch of the buffer.
        index = np.concatenate((index[is_output], index[~is_output]))
        num_counted, num_output = len(index), int(is_output.sum())
        self._counted.host[:num_counted, 0] = index
        self._counted.host[:num_counted, 1] = token_rows[index]
        return Counted(self._counted.stage(num_counted), num_output, accepted)

    def _take_accepted(self, plan: StepPlan) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for row, num_computed in zip(plan.rows, plan.num_computed, strict=True):
            start, draft = self._drafts.pop(row, (0, []))
            found += [(row, token) for token in draft[: num_computed - start]]
        return found

    def count(self, counted: Counted, input_ids: torch.Tensor) -> None:
        """Count what was staged and uploaded. input_ids: [T], on the device."""
        index, rows = counted.places.unbind(1)
        self._book(rows, input_ids[index], counted.num_output)
        if counted.accepted:
            rows, token_ids = self._pairs(counted.accepted).unbind(1)
            self._book(rows, token_ids, len(counted.accepted))

    def adjustments(
        self, rows: Ints, output_index: Ints, plan: StepPlan | None = None
    ) -> Adjustments | None:
        """Stage and return what the sampled rows want done; None if none of them wants anything.

        rows, output_index: [B], of the plan's sampled tokens
        """
        if not self._has_rules[rows].any():
            return None
        num = len(rows)
        self._rows.host[:num] = rows
        is_before_min = output_index < self._min_tokens[rows]
        has_masked = bool(is_before_min.any())
        self._is_before_min.host[:num] = is_before_min
        return Adjustments(
            rows=self._rows.stage(num),
            bias=self._bias if self._has_bias[rows].any() else None,
            is_stop=self._is_stop if has_masked else None,
            is_before_min_tokens=self._is_before_min.stage(num) if has_masked else None,
            penalties=self._row_batch_penalties(rows, plan),
        )

    def _row_batch_penalties(self, rows: Ints, plan: StepPlan | None) -> Penalties | None:
        if not self._has_penalties[rows].any():
            return None
        assert self._counts is not None and self._is_in_prompt is not None
        self._penalties.host[: len(rows)] = self._row_penalties[rows]
        presence, frequency, repetition = self._penalties.stage(len(rows)).unbind(1)
        drafted = [] if plan is None else self._before_draws(plan)
        return Penalties(
            *(presence, frequency, repetition, self._counts, self._is_in_prompt),
            drafted=self._pairs(drafted) if drafted else None,
        )

    def _before_draws(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Return the draft tokens before each token that is sampled, by its place among those."""
        if not plan.num_drafting:
            return []
        starts = [0, *accumulate(plan.num_drawn)]
        return [
            (starts[i] + n, token)
            for i, _, draft in plan.drafts()
            if self._has_penalties[plan.rows[i]]
            for n in range(1, len(draft) + 1)
            for token in draft[:n]
        ]

    def _pairs(self, pairs: list[tuple[int, int]]) -> torch.Tensor:
        return upload_array(np.array(pairs, dtype=np.int64), self._device)

    def _clear(self, row: int) -> None:
        self.num_rows -= 1
        self._drafts.pop(row, None)
        if self._bias is not None and self._has_bias[row]:
            self._bias[row].zero_()
        for flags in (self._has_rules, self._has_bias, self._has_penalties):
            flags[row] = False
        self._min_tokens[row] = 0
        self._row_penalties[row] = _NO_PENALTIES

    def _set_bias(self, row: int, rules: LogitRules) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        self._has_bias[row] = True
        if rules.allowed_tokens:
            self._bias[row].masked_fill_(self._is_forbidden(rules.allowed_tokens), -torch.inf)
        if rules.biases:
            token_ids = upload_once(rules.bias_token_ids, torch.int64, self._device)
            biases = upload_once(rules.biases, torch.float32, self._device)
            self._bias[row].index_add_(0, token_ids, biases)

    def _set_stop(self, row: int, stop_token_ids: Iterable[int]) -> None:
        if self._is_stop is None:
            self._is_stop = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._is_stop[row].zero_()
        self._is_stop[row].index_fill_(0, self._known(stop_token_ids), True)

    def _set_penalties(self, row: int, found: RowRules) -> None:
        if self._counts is None or self._is_in_prompt is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._is_in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        rules = found.rules
        self._has_penalties[row] = True
        self._row_penalties[row] = (
            rules.presence_penalty,
            rules.frequency_penalty,
            rules.repetition_penalty,
        )
        self._counts[row].zero_()
        self._is_in_prompt[row].zero_()
        prompt = found.computed_token_ids[: found.num_prompt_tokens]
        output = found.computed_token_ids[found.num_prompt_tokens :]
        token_ids = self._known(output + prompt)
        self._book(torch.full_like(token_ids, row), token_ids, len(output))

    def _book(self, rows: torch.Tensor, token_ids: torch.Tensor, num_output: int) -> None:
        """Enter tokens into the rows' tables; the first `num_output` are output."""
        assert self._counts is not None and self._is_in_prompt is not None
        if num_output:
            where = (rows[:num_output], token_ids[:num_output])
            one = torch.ones(num_output, dtype=torch.int32, device=self._device)
            self._counts.index_put_(where, one, accumulate=True)
        if num_output < len(rows):
            self._is_in_prompt[rows[num_output:], token_ids[num_output:]] = True

    def _is_forbidden(self, allowed_tokens: bytes) -> torch.Tensor:
        """Return what a mask leaves out: bool [V]."""
        packed = np.frombuffer(allowed_tokens, dtype=np.uint8)
        bits = np.unpackbits(packed, count=self._shape[1], bitorder="little")
        return upload_array(bits == 0, self._device)

    def _known(self, token_ids: Iterable[int]) -> torch.Tensor:
        known = [token_id for token_id in token_ids if token_id < self._shape[1]]
        return upload_once(known, torch.int64, self._device)


_NO_PENALTIES = (0.0, 0.0, 1.0)
