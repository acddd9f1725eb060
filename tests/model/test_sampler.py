"""Sampling, filters, bias, masks and penalties against transformers; reproducibility, logprobs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from model.kernels import cpu, drawing, triton
from model.kernels.cpu.native import native_function
from model.kernels.drawing import likeliest
from model.kernels.filters import filter_top_k_top_p
from model.kernels.triton import filters as triton_filters
from model.sampler import (
    Adjustments,
    Penalties,
    SamplingTensors,
    adjust_logits,
    draw_uniform,
    sample,
    score,
)

VOCAB = 37


def tensors(
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    num_logprobs: int = -1,
    min_p: list[float] | None = None,
    adjustments: Adjustments | None = None,
) -> SamplingTensors:
    n = len(temperature)
    top_k, top_p, min_p = top_k or [0] * n, top_p or [1.0] * n, min_p or [0.0] * n
    uniform = draw_uniform(
        np.array(seeds or range(n), dtype=np.uint64), np.array(positions or [0] * n)
    )
    return SamplingTensors(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float32),
        min_p=torch.tensor(min_p, dtype=torch.float32),
        uniform=torch.from_numpy(uniform),
        num_logprobs=num_logprobs,
        all_greedy=not any(temperature),
        any_top_k=any(top_k),
        any_top_p=any(p < 1 for p in top_p),
        any_min_p=any(min_p),
        adjustments=adjustments,
    )


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def reference_probs(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Warp with transformers' own processors, in our order. logits: [1, V]."""
    processors = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(temperature)]
    )
    if min_p:
        processors.append(transformers.MinPLogitsWarper(min_p))
    if top_k:
        processors.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(transformers.TopPLogitsWarper(top_p))
    return processors(torch.tensor([[]]), logits).softmax(-1)[0]


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.5, 0, 0.8, 0.0),
    (2.0, 1000, 0.3, 0.0),
    (1.0, 1, 1.0, 0.0),
    (3.0, 0, 1.0, 0.3),
    (1.0, 0, 1.0, 1.0),
    (1.3, 15, 0.95, 0.02),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_draws_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    n = 20_000
    logits = random_logits(1)
    probs = reference_probs(logits, temperature, top_k, top_p, min_p).double()
    given = tensors(
        [temperature] * n, [top_k] * n, [top_p] * n, [42] * n, list(range(n)), min_p=[min_p] * n
    )
    drawn = sample(logits.expand(n, -1), given)
    counts = torch.bincount(drawn.token_ids, minlength=VOCAB).double()
    assert not counts[probs == 0].any()
    # Chi-square wants at least 5 expected draws in a bin: the rare tokens share one.
    rare = probs * n < 5
    wanted = torch.cat((probs[~rare], probs[rare].sum()[None])) * n
    found = torch.cat((counts[~rare], counts[rare].sum()[None]))
    used = wanted > 0
    statistic = float(((found - wanted)[used] ** 2 / wanted[used]).sum())
    freedom = int(used.sum()) - 1
    # Mean n, variance 2n: five deviations are beyond chance, and the draws are fixed.
    assert statistic <= freedom + 5 * math.sqrt(2 * max(freedom, 0)) + 1e-6


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        *((top_k, 1.0) for top_k in (1, 2, 7, VOCAB, 500)),
        *((0, top_p) for top_p in (0.01, 0.3, 0.5, 0.9, 0.999)),
        (6, 0.8),
    ],
)
def test_filters_mask_what_transformers_masks(top_k: int, top_p: float) -> None:
    wanted = logits = random_logits(200)
    if top_k:
        wanted = transformers.TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = transformers.TopPLogitsWarper(top_p)(None, wanted)
    found = filter_top_k_top_p(logits, torch.full((200,), top_k), torch.full((200,), top_p))
    assert torch.equal(found, wanted)


def sorted_filter(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Filter by sorting every row whole; the mass before each token decides."""
    vocab_size = logits.shape[-1]
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last.unsqueeze(1)), -torch.inf)
    probs = ordered.softmax(dim=-1, dtype=torch.float64)
    mass_before = probs.cumsum(dim=-1) - probs
    threshold = top_p.unsqueeze(-1).double()
    # Masses of other orders of addition are others in their last bits: the edge is left open.
    assume(bool(((mass_before - threshold).abs() > 1e-12).logical_or(probs == 0).all()))
    is_cut = (mass_before >= threshold) & (threshold < 1)
    is_cut[:, 0] = False
    kept = ordered.masked_fill(is_cut, -torch.inf)
    return torch.empty_like(logits).scatter_(1, token_ids, kept)


@st.composite
def filtered_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw logits with ties and -inf at any temperature, and each row's top-k and top-p."""
    rows, vocab = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 5, 37, 300, 1000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, vocab, generator=generator)
    for row in logits:
        if draw(st.booleans()):
            row.copy_((row * draw(st.sampled_from([0.0, 1.0, 3.0]))).round())
        row /= draw(st.sampled_from([1e-38, 1e-3, 0.3, 1.0, 7.0, 1e4, 1e30]))
        is_masked = torch.rand(vocab, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
        is_masked[draw(st.integers(0, vocab - 1))] = False
        row.masked_fill_(is_masked, -torch.inf)
    logits = logits.nan_to_num(neginf=-torch.inf, posinf=torch.finfo(torch.float32).max)
    logits -= logits.amax(-1, keepdim=True)
    counts = st.one_of(st.just(0), st.integers(1, vocab + 3))
    # Numbers that few sums of equal masses come near.
    masses = st.one_of(st.just(1.0), st.floats(1e-6, 0.9999), st.sampled_from([1e-45, 1 - 2**-24]))
    top_k = draw(st.lists(counts, min_size=rows, max_size=rows))
    top_p = draw(st.lists(masses, min_size=rows, max_size=rows))
    return logits, torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float32)


@given(filtered_rows())
@settings(deadline=None, max_examples=300)
def test_filters_keep_what_sorting_the_row_keeps(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    logits, top_k, top_p = rows
    wanted = sorted_filter(logits, top_k, top_p)
    found = filter_top_k_top_p(logits, top_k, top_p)
    assert torch.equal(found, wanted)
    for i, row in enumerate(found):
        alone = filter_top_k_top_p(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1])
        assert torch.equal(alone[0], row)


Asked = dict[str, torch.Tensor | None]


@st.composite
def asked_rows(draw: st.DrawFn) -> tuple[torch.Tensor, Asked]:
    """Draw logits in rows that lie apart, several of each kind, and what `draw` is asked of
    them."""
    kinds, repeats = draw(st.integers(1, 4)), 16
    vocab = draw(st.sampled_from([1, 31, 128, 130, 1000, 5003]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(kinds, vocab + 5, generator=generator)
    for row in logits:
        row *= draw(st.sampled_from([0.0, 0.1, 3.0, 50.0]))
        if draw(st.booleans()):
            row.round_()

    def column(values: st.SearchStrategy[Any], dtype: torch.dtype) -> torch.Tensor:
        found = draw(st.lists(values, min_size=kinds, max_size=kinds))
        return torch.tensor(found, dtype=dtype).repeat_interleave(repeats)

    counts = st.integers(1, vocab + 3)
    asked: Asked = {
        "temperature": column(st.sampled_from([0.0, 1e-38, 0.7, 1.0, 5.0]), torch.float32),
        "uniform": torch.rand(kinds * repeats, dtype=torch.float64, generator=generator),
        "allowed": None,
        "top_k": column(st.one_of(st.just(0), st.integers(1, 9), counts), torch.int64),
        "top_p": column(st.sampled_from([1.0, 0.95, 0.5, 1e-3, 1e-45, 1 - 2**-24]), torch.float32),
        "min_p": column(st.sampled_from([0.0, 0.02, 0.5, 1.0]), torch.float32),
    }
    if draw(st.booleans()):
        words = torch.randint(-(2**31), 2**31, (kinds, -(-vocab // 32)), generator=generator)
        words[:, 0] |= 1
        asked["allowed"] = words.to(torch.int32).repeat_interleave(repeats, 0)
    for name in ("top_k", "top_p", "min_p"):
        if draw(st.booleans()):
            asked[name] = None
    return logits.repeat_interleave(repeats, 0)[:, :vocab], asked


def probs_of(logits: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Return the masses, float64 [V], among which `drawing.draw` draws a token of a row."""
    seen: list[torch.Tensor] = []

    def note(probs: torch.Tensor, _uniform: torch.Tensor) -> torch.Tensor:
        seen.append(probs)
        return torch.zeros(len(probs), dtype=torch.int64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_at_mass", note)
        drawing.draw(logits, **asked)  # type: ignore[arg-type]
    return seen[0][0].double()


def may_draw(token: int, logits: torch.Tensor, asked: Asked) -> bool:
    """Return whether `drawing.draw` could draw a token of a row if it added masses in another
    order."""
    slack = 1e-5
    top_p, uniform = asked["top_p"], asked["uniform"]
    assert uniform is not None
    for shift in (0.0, -slack, slack):
        shifted = dict(asked)
        if top_p is not None:
            shifted["top_p"] = torch.where(top_p < 1, (top_p + shift).clamp(1e-45, 1), top_p)
        probs = probs_of(logits, shifted)
        before = float(probs[:token].sum())
        if probs[token] > 0 and before - slack <= float(uniform) <= before + probs[token] + slack:
            return True
    return False


@given(asked_rows())
@settings(deadline=None, max_examples=300)
def test_the_kernel_draws_what_torch_functions_draw(rows: tuple[torch.Tensor, Asked]) -> None:
    if native_function("draw", torch.float32, "drawing") is None:
        pytest.skip("C++ kernels are off")
    logits, asked = rows
    found = cpu.draw(logits, **asked)  # type: ignore[arg-type]
    wanted = drawing.draw(logits, **asked)  # type: ignore[arg-type]
    for i, token in enumerate(found.tolist()):
        only = {
            name: None if values is None else values[i : i + 1] for name, values in asked.items()
        }
        alone = cpu.draw(logits[i : i + 1], **only)  # type: ignore[arg-type]
        assert int(alone) == token, "other rows change nothing"
        if token != int(wanted[i]):
            assert only["temperature"] is not None and float(only["temperature"]) > 0
            assert may_draw(token, logits[i : i + 1], only)


@pytest.mark.parametrize("kernels", [cpu, triton])
def test_greedy_rows_with_masks_draw_nothing(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.sampler.kernels_for", lambda _: kernels)
    monkeypatch.delattr(drawing, "_at_mass")
    logits = random_logits(40, vocab=1000)
    words = torch.randint(-(2**31), 2**31, (40, 32), generator=torch.Generator().manual_seed(1))
    given = dataclasses.replace(tensors([0.0] * 40), allowed=words.to(torch.int32))
    # What is likeliest without the mask may not be allowed.
    found = sample(logits, given, likeliest(logits)).token_ids
    is_allowed = (words.unsqueeze(-1) >> torch.arange(32) & 1).flatten(1)[:, :1000].bool()
    assert torch.equal(found, logits.masked_fill(~is_allowed, -torch.inf).argmax(-1))


@given(
    st.integers(1, 6),
    st.sampled_from([1, 15, 128, 1003]),
    st.integers(0, 2**32),
    st.lists(st.sampled_from([-0.7, 0.0, 1.2]), min_size=2, max_size=2),
    st.sampled_from([0.5, 1.0, 1.3]),
)
@settings(deadline=None)
def test_the_kernel_penalises_as_torch_functions_do(
    rows: int, vocab: int, seed: int, additive: list[float], repetition: float
) -> None:
    if native_function("penalise", torch.float32, "drawing") is None:
        pytest.skip("C++ kernels are off")
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + 3, generator=generator)[:, :vocab]
    logits[:, ::5] = -torch.inf
    tables = (
        torch.randint(0, 3, (8, vocab), generator=generator, dtype=torch.int32),
        torch.rand(8, vocab, generator=generator) < 0.4,
        torch.randperm(8, generator=generator)[:rows],
    )
    # One row wants nothing; they lie side by side, as a step uploads them.
    wanted = torch.tensor([*additive, repetition]).repeat(rows, 1)
    wanted[rows // 2] = torch.tensor([0.0, 0.0, 1.0])
    found = cpu.penalise(logits, *tables, *wanted.unbind(1))
    expected = drawing.penalise(logits, *tables, *wanted.unbind(1))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(found[rows // 2], logits[rows // 2])


def test_greedy_rows_stay_greedy_beside_random_ones() -> None:
    logits = random_logits(60)
    # A temperature so small that it would overflow is greedy too.
    drawn, likeliest_ids = (
        sample(logits, tensors([0.0, 1e-38, 5.0] * 20)).token_ids,
        logits.argmax(-1),
    )
    for i in range(2):
        assert torch.equal(drawn[i::3], likeliest_ids[i::3])
    assert not torch.equal(drawn[2::3], likeliest_ids[2::3])


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rows = 60
    logits = random_logits(rows, vocab=509)
    temperature = [(0.0, 0.5, 1.0, 3.0)[i % 4] for i in range(rows)]
    top_k = [(0, 0, 10)[i % 3] for i in range(rows)]
    top_p = [(1.0, 1.0, 1.0, 1.0, 0.7)[i % 5] for i in range(rows)]
    seeds, positions = list(range(100, 100 + rows)), list(range(rows))
    min_p = [(0.0, 0.0, 0.2, 0.0)[i % 4] for i in range(rows)]
    wanted = random_adjustments(rows, 509)
    given = (temperature, top_k, top_p, seeds, positions)
    batch = sample(logits, tensors(*given, min_p=min_p, adjustments=wanted)).token_ids
    for i in range(rows):
        alone = tensors(
            *([values[i]] for values in given), min_p=[min_p[i]], adjustments=only(wanted, i)
        )
        assert int(sample(logits[i : i + 1], alone).token_ids) == int(batch[i])


def test_a_row_without_wishes_is_untouched_beside_others() -> None:
    rows = 40
    logits = random_logits(rows, vocab=509)
    wanted = random_adjustments(rows, 509)
    adjusted = adjust_logits(logits, wanted)
    for i in range(rows):
        assert torch.equal(adjusted[i], logits[i]) == (i % 5 == 4)


def random_adjustments(rows: int, vocab: int) -> Adjustments:
    """Rows want in turn: a bias, a mask, penalties, all of these, nothing. Tables run backwards."""
    generator = torch.Generator().manual_seed(5)
    kind = torch.arange(rows) % 5
    has_bias = (kind == 0) | (kind == 3)
    has_penalties = (kind == 2) | (kind == 3)
    counts = torch.randint(0, 3, (rows, vocab), generator=generator, dtype=torch.int32)
    penalties = Penalties(
        presence=torch.where(has_penalties, 0.7, 0.0),
        frequency=torch.where(has_penalties, -0.4, 0.0),
        repetition=torch.where(has_penalties, 1.4, 1.0),
        output_counts=counts.flip(0),
        is_in_prompt=torch.rand(rows, vocab, generator=generator) < 0.3,
    )
    bias = torch.randn(rows, vocab, generator=generator) * has_bias.unsqueeze(-1)
    return Adjustments(
        rows=torch.arange(rows).flip(0),
        bias=bias.flip(0),
        is_stop=torch.rand(rows, vocab, generator=generator) < 0.5,
        is_before_min_tokens=(kind == 1) | (kind == 3),
        penalties=penalties,
    )


def only(wanted: Adjustments, i: int) -> Adjustments:
    """Return one row's adjustments, with all tables."""
    assert wanted.penalties is not None and wanted.is_before_min_tokens is not None
    fields = {
        name: getattr(wanted.penalties, name)[i : i + 1]
        for name in ("presence", "frequency", "repetition")
    }
    return dataclasses.replace(
        wanted,
        rows=wanted.rows[i : i + 1],
        is_before_min_tokens=wanted.is_before_min_tokens[i : i + 1],
        penalties=dataclasses.replace(wanted.penalties, **fields),
    )


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits, rows = random_logits(30), torch.arange(30)
    options = {"min_p": [0.1] * 30, "adjustments": random_adjustments(30, VOCAB)}
    drawn = sample(logits, tensors([2.0] * 30, [3] * 30, num_logprobs=5, **options))
    wanted = logits.double().log_softmax(-1)
    # Tokens of a prompt are scored like drawn ones.
    for found in (drawn, score(logits, rows, 5)):
        assert found.logprobs is not None and found.ranks is not None
        of_tokens = wanted[rows, found.token_ids].float()
        torch.testing.assert_close(found.logprobs, of_tokens, atol=1e-5, rtol=0)
        values, token_ids = wanted.topk(5)
        assert torch.equal(found.top_token_ids, token_ids)
        torch.testing.assert_close(found.top_logprobs, values.float(), atol=1e-5, rtol=0)
        order = logits.argsort(dim=-1, descending=True)
        assert torch.equal(order[rows, found.ranks - 1], found.token_ids)


@pytest.mark.parametrize(("num_logprobs", "columns"), [(0, 0), (3, 3), (VOCAB + 5, VOCAB)])
def test_as_many_likeliest_tokens_as_asked_for(num_logprobs: int, columns: int) -> None:
    found = sample(random_logits(4), tensors([0.0] * 4, num_logprobs=num_logprobs))
    assert found.top_token_ids is not None
    assert found.top_token_ids.shape == (4, columns)
    assert found.ranks is not None
    assert found.ranks.tolist() == [1] * 4


def test_no_logprobs_are_computed_unasked() -> None:
    found = sample(random_logits(4), tensors([0.0] * 4))
    assert found.logprobs is found.ranks is found.top_token_ids is found.top_logprobs is None


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_extreme_uniforms_draw_tokens_with_mass(uniform: float) -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 2:4] = 0.0
    given = torch.tensor([uniform], dtype=torch.float64)
    drawn = sample(logits, dataclasses.replace(tensors([1.0]), uniform=given))
    assert int(drawn.token_ids) in (2, 3)


def test_logits_that_are_not_numbers_still_give_a_token_id() -> None:
    logits = torch.full((2, VOCAB), torch.nan)
    drawn = sample(logits, tensors([0.0, 1.0], top_p=[1.0, 0.5])).token_ids
    assert ((drawn >= 0) & (drawn < VOCAB)).all()


def _splitmix64(state: int, count: int) -> list[int]:
    """Return SplitMix64's outputs from a state, in plain integers."""
    mask, outputs = 2**64 - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_uniforms_are_splitmix64() -> None:
    # The first outputs for state 1234567, as published with Java's and Rosetta Code's versions.
    assert _splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]
    for seed in (0, 1, 2**64 - 1, 0x123456789ABCDEF):
        golden = 0x9E3779B97F4A7C15
        mixed = _splitmix64((seed - golden) % 2**64, 1)[0]
        wanted = [(bits >> 11) * 2.0**-53 for bits in _splitmix64(mixed, 50)]
        found = draw_uniform(np.full(50, seed, dtype=np.uint64), np.arange(50))
        assert found.tolist() == wanted


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters are launched and not run: a CPU's read their arguments row by row."""
    monkeypatch.setattr("model.sampler.kernels_for", lambda _: triton)
    for kernel in (triton_filters._search_kernel, triton_filters._filter_kernel):
        monkeypatch.setattr(kernel, "run", lambda *_, **__: None)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("a value was read from the device")

    wanted = random_adjustments(2, VOCAB)
    given = tensors(
        [0.0, 1.0], [0, 3], [0.9, 1.0], num_logprobs=2, min_p=[0.1, 0], adjustments=wanted
    )
    logits = random_logits(2)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    sample(logits, given)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_more_rows_are_no_more_operations() -> None:
    """No loop over rows: as many operations run for 50 rows as for 5."""
    counts = []
    for rows in (5, 50):
        given = tensors(
            [0.0, 1.0, 2.0, 0.5, 0.0] * (rows // 5),
            [0, 3, 0, 9, 0] * (rows // 5),
            [0.9, 1.0, 1.0, 0.5, 1.0] * (rows // 5),
            num_logprobs=2,
            min_p=[0.1, 0, 0, 0.2, 0] * (rows // 5),
            adjustments=random_adjustments(rows, VOCAB),
        )
        logits = random_logits(rows)
        with CountOperations() as counted:
            sample(logits, given)
        counts.append(counted.num)
    assert counts[0] == counts[1] > 0


class CountOperations(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("vocab_size", [512, 151936, 70001, 65537, 1 << 16])
def test_the_likeliest_token_is_the_first_maximum(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # Few distinct values, so that nearly every row has ties in several chunks.
    logits = torch.randint(0, 4, (9, vocab_size), generator=generator).float()
    logits[1, -1] = logits[2, 0] = logits[3, 511] = logits[3, 512 % vocab_size] = 9.0
    logits[4] = -torch.inf
    logits[5, vocab_size - 2] = torch.nan
    logits[6, :] = 1.0
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))


NUM_TOKENS = 41
PROMPTS = [[1, 2, 2, 3], [40], [7, 8, 9, 7]]
OUTPUTS: list[list[int]] = [[3, 3, 3, 5], [], [7, 0]]


def prompt_logits() -> torch.Tensor:
    return 3 * torch.randn(len(PROMPTS), NUM_TOKENS, generator=torch.Generator().manual_seed(1))


def penalties(presence: float, frequency: float, repetition: float) -> Adjustments:
    counts = torch.zeros(len(PROMPTS), NUM_TOKENS, dtype=torch.int32)
    is_in_prompt = torch.zeros(len(PROMPTS), NUM_TOKENS, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        is_in_prompt[row, prompt] = True
        counts[row] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=NUM_TOKENS)
    rows = torch.arange(len(PROMPTS))
    given = [torch.full((len(PROMPTS),), value) for value in (presence, frequency, repetition)]
    return Adjustments(rows, None, None, None, Penalties(*given, counts, is_in_prompt))


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.1, 2.0])
def test_repetition_penalty_is_that_of_transformers(repetition: float) -> None:
    logits = prompt_logits()
    found = adjust_logits(logits, penalties(0.0, 0.0, repetition))
    processor = transformers.RepetitionPenaltyLogitsProcessor(repetition)
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        history = torch.tensor([prompt + output])
        assert torch.equal(found[row], processor(history, logits[row : row + 1].clone())[0])


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.3), (-1.0, 1.5)])
def test_presence_and_frequency_follow_openais_formula(presence: float, frequency: float) -> None:
    logits = prompt_logits()
    found = adjust_logits(logits, penalties(presence, frequency, 1.0))
    for row, output in enumerate(OUTPUTS):
        for token in range(NUM_TOKENS):
            count = output.count(token)
            wanted = float(logits[row, token]) - count * frequency - (count > 0) * presence
            assert float(found[row, token]) == pytest.approx(wanted, abs=1e-6)


def test_repetition_comes_before_the_two_others() -> None:
    logits = prompt_logits()
    found = adjust_logits(logits, penalties(0.5, 0.25, 1.7))
    repeated = adjust_logits(logits, penalties(0.0, 0.0, 1.7))
    torch.testing.assert_close(found, adjust_logits(repeated, penalties(0.5, 0.25, 1.0)))


def test_bias_is_that_of_transformers() -> None:
    logits = prompt_logits()
    bias = torch.zeros(len(PROMPTS), NUM_TOKENS)
    bias[1, 4], bias[1, 5] = 3.5, -100.0
    wanted = transformers.SequenceBiasLogitsProcessor({(4,): 3.5, (5,): -100.0})
    found = adjust_logits(logits, Adjustments(torch.tensor([0, 1, 2]), bias, None, None, None))
    assert torch.equal(found[1], wanted(torch.tensor([[1]]), logits[1:2])[0])
    assert torch.equal(found[[0, 2]], logits[[0, 2]])


def test_stop_tokens_are_masked_like_transformers_before_min_tokens() -> None:
    logits = prompt_logits()
    is_stop = torch.zeros(len(PROMPTS), NUM_TOKENS, dtype=torch.bool)
    is_stop[:, [2, 9]] = True
    is_before = torch.tensor([True, False, True])
    bias = torch.zeros(len(PROMPTS), NUM_TOKENS)
    bias[:, 2] = 100.0  # a bias does not bring a stop token back
    rows = torch.tensor([0, 1, 2])
    found = adjust_logits(logits, Adjustments(rows, bias, is_stop, is_before, None))
    processor = transformers.MinNewTokensLengthLogitsProcessor(0, 5, [2, 9], device="cpu")
    wanted = processor(torch.tensor([[1]]), logits.clone())
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
    assert float(found[1, 2]) == pytest.approx(float(logits[1, 2]) + 100, abs=1e-4)
    assert torch.equal(found[1, 3:], logits[1, 3:])
