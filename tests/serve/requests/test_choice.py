"""Deltas joined are the whole text, however tokens and characters are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from cluster.wire.messages import EngineOutput, FinishReason, GenerateRequest
from serve.requests.choice import Choice, StopMatcher, StopStrings
from serve.requests.sampling import Resolver, SamplingParams
from serve.requests.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """GPT-2's kind: 256 bytes, some merges, special tokens and an added token of raw text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ã", "©")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    rust.add_tokens([AddedToken("«tool call»", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust), ())


def sentence_piece() -> Tokenizer:
    """Llama's kind: a space is part of the word behind it; unknown characters become bytes."""
    pieces = ["▁", "▁he", "he", "ll", "o", "▁w", "é", "日", " ", ".", "▁.", "�"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust), ())


TOKENIZERS = {"byte_level": byte_level(), "sentence_piece": sentence_piece()}
# Two ids past the vocabulary as well: models have more rows than their tokenizers have tokens.
IDS = {name: st.integers(0, t.vocab_size + 1) for name, t in TOKENIZERS.items()}
BOTH = pytest.mark.parametrize("name", TOKENIZERS)


def choice_of(tokenizer: Tokenizer, prompt: Sequence[int] = (), **fields: Any) -> Choice:
    """Return a choice of a request with such sampling parameters."""
    params = SamplingParams(**{"max_tokens": None, **fields})
    resolver = Resolver(
        params, max_model_len=20_000, vocab_size=20_000, eos_token_ids=(), grammar_text=str
    )
    request = GenerateRequest("r", list(prompt), [], resolver.choices(1)[0], b"")
    return Choice(0, request, tokenizer, params, StopStrings(params.stop_strings))


def output(
    token_ids: Sequence[int], finish_reason: str = "", stop_token_id: int = -1
) -> EngineOutput:
    ended = EngineOutput.ended("r", FinishReason(finish_reason))
    return msgspec.structs.replace(ended, token_ids=list(token_ids), stop_token_id=stop_token_id)


def stream(
    choice: Choice, token_ids: Sequence[int], cuts: random.Random | None = None
) -> tuple[list[str], str | int | None]:
    """Absorb in pieces; return the deltas, and the stop string."""
    rest, deltas, stop = list(token_ids), list[str](), None
    while not choice.is_finished:
        size = cuts.randint(1, 5) if cuts else 1
        piece, rest = rest[:size], rest[size:]
        choice.absorb(output(piece, "" if piece else "length"))
        delta = choice.take()
        deltas.append(delta.text)
        stop = delta.stop_reason
    choice.absorb(output(token_ids))
    assert choice.take().token_ids == [], "nothing follows the end"
    return deltas, stop


def decoded(tokenizer: Tokenizer, token_ids: Sequence[int], skip: bool = True) -> str:
    """All tokens decoded at once, where bytes that make no character spoil none before them.

    From the first such byte to the end of its run each is U+FFFD, which the vocabulary has.
    """
    if tokenizer.is_byte_level:
        return tokenizer.decode(token_ids, skip_special_tokens=skip)
    skipped = tokenizer.special_token_ids if skip else frozenset()
    kept = [i for i in token_ids if i not in skipped and tokenizer.token(i) is not None]
    found: list[int] = []
    for is_run, group in groupby(kept, tokenizer.is_byte_fallback):
        run = list(group)
        num_good = len(run)
        while is_run and not is_utf8(b"".join(map(tokenizer.token_bytes, run[:num_good]))):
            num_good -= 1
        found += run[:num_good] + [tokenizer._rust.token_to_id("�")] * (len(run) - num_good)
    return tokenizer.decode(found, skip_special_tokens=False)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def cut(text: str, stop: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The plain way: of all prefixes of the text, the shortest that ends with a stop string."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@BOTH
@settings(max_examples=200, deadline=None)
@given(data=st.data(), seed=st.randoms(use_true_random=False), skip=st.booleans())
def test_deltas_are_what_any_tokens_add_to_any_prompt(
    name: str, data: st.DataObject, seed: random.Random, skip: bool
) -> None:
    """Prompts end with a word: one that ends within a character is none of ours to complete."""
    tokenizer = TOKENIZERS[name]
    words = [tokenizer._rust.token_to_id("he")]
    prompt = data.draw(st.lists(IDS[name], max_size=12)) + data.draw(st.sampled_from([[], words]))
    prompt *= prompt[-1:] == words
    token_ids = data.draw(st.lists(IDS[name], max_size=40))
    before = decoded(tokenizer, prompt, skip)
    whole = decoded(tokenizer, [*prompt, *token_ids], skip)
    assert whole.startswith(before)
    choice = choice_of(tokenizer, prompt, skip_special_tokens=skip)
    deltas, _ = stream(choice, token_ids, seed)
    assert "".join(deltas) == whole[len(before) :]


@BOTH
@settings(max_examples=200, deadline=None)
@given(data=st.data(), seed=st.randoms(use_true_random=False), include=st.booleans())
def test_text_ends_at_the_first_complete_stop_string(
    name: str, data: st.DataObject, seed: random.Random, include: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text("he lo.é日", max_size=30))
    stop = data.draw(st.lists(st.text("he lo.é日", min_size=1, max_size=4), max_size=3))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    wanted = cut(decoded(tokenizer, token_ids), stop, include)
    choice = choice_of(tokenizer, stop=stop, include_stop_str_in_output=include)
    deltas, stop_string = stream(choice, token_ids, seed)
    assert ("".join(deltas), stop_string) == wanted
    if stop_string is not None and name == "byte_level":
        used = [decoded(tokenizer, token_ids[: choice.num_tokens - n]) for n in (0, 1)]
        assert [cut(each, stop, include)[1] for each in used] == [stop_string, None]


@given(text=st.text("abc", max_size=20), stop=st.lists(st.text("abc", min_size=1), max_size=3))
def test_matcher_holds_back_only_what_a_stop_string_starts_with(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stop), include_stop=False)
    certain = ""
    for char in text:
        new, found = matcher.push(char)
        certain += new
        if found is not None:
            return
    held = text[len(certain) :]
    assert held == matcher.held
    assert not held or any(s.startswith(held) for s in stop)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ("▁he ▁w ▁ ▁he", ["he", " w", " ", " he", ""]),
        ("▁he <0x0A> <0x0A> ▁he", ["he", "\n", "\n", " he", ""]),
        ("<0xC3> <0xBC> <0xC3> <0xBC> <0xC3> ▁he", ["", "ü", "", "ü", "", "� he", ""]),
        ("<0xC3> <0x0A> <0xBC>", ["", "", "", "���"]),
    ],
)
def test_words_keep_their_spaces_and_bytes_arrive_with_their_character(
    tokens: str, wanted: list[str]
) -> None:
    tokenizer = TOKENIZERS["sentence_piece"]
    token_ids = [tokenizer._rust.token_to_id(token) for token in tokens.split()]
    assert stream(choice_of(tokenizer), token_ids)[0] == wanted


def test_a_word_behind_a_prompt_keeps_its_space_and_a_stop_string_finds_it() -> None:
    tokenizer = TOKENIZERS["sentence_piece"]
    word, ll, o, byte = (tokenizer._rust.token_to_id(t) for t in ("▁he", "ll", "o", "<0xC3>"))
    ids = [word, ll, o]
    assert stream(choice_of(tokenizer, []), ids)[0][0] == "he"
    assert stream(choice_of(tokenizer, [word]), ids)[0][0] == " he"
    # What the output may go on with is no context, what stands before it is.
    assert stream(choice_of(tokenizer, [word, byte]), ids)[0][0] == " he"
    assert stream(choice_of(tokenizer, [word], stop=[" he"]), ids) == ([""], " he")


def test_text_arrives_with_the_token_that_completes_its_character_or_with_the_last_one() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = tokenizer.encode("日本 hi日", add_special_tokens=False)[:-1]
    deltas, _ = stream(choice_of(tokenizer), token_ids)
    assert deltas == ["", "", "日", "", "", "本", " ", "h", "i", "", "", "�"]


@pytest.mark.parametrize("include", [False, True])
def test_token_that_ended_the_sequence_has_text_only_when_included(include: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    [h, end] = tokenizer.encode("h<|im_end|>", add_special_tokens=False)
    choice = choice_of(tokenizer, include_stop_str_in_output=include, skip_special_tokens=False)
    choice.absorb(output([h, end], "stop", stop_token_id=end))
    delta = choice.take()
    assert delta.text == ("h<|im_end|>" if include else "h")
    assert (delta.token_ids, choice.num_tokens) == ([h, end], 2)


@BOTH
def test_long_runs_without_text_take_constant_time_per_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    byte = tokenizer._rust.token_to_id("<0xFF>" if name == "sentence_piece" else "ÿ")
    special = tokenizer._rust.token_to_id(SPECIAL[0])
    num_decodes = 0

    class Counting(Tokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            nonlocal num_decodes
            num_decodes += len(token_ids)
            return super().decode(token_ids, skip_special_tokens)

    token_ids = [byte] * 5000 + [special] * 5000
    deltas, _ = stream(choice_of(Counting(tokenizer._hf, ())), token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids)
    assert num_decodes <= 3 * len(token_ids)


@pytest.mark.parametrize(
    ("stop", "min_tokens", "wanted"),
    [
        (["l"], 0, "he"),
        (["l"], 3, "hel"),
        (["l"], 4, "hello, he"),
        (["ll"], 3, "he"),  # begins within the first tokens, and is complete behind them
        (["ell"], 4, "hello, h"),
        (["ell", "zzzz"], 4, "hello, h"),
        (["o", "o, hex"], 5, "hello, hell"),  # complete at once, and held for the longer one
        (["l"], 100, "hello, hello"),
    ],
)
def test_stop_strings_wait_for_min_tokens(stop: list[str], min_tokens: int, wanted: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    # One token per character, so that the tokens are easy to count.
    ids = [tokenizer.encode(char)[0] for char in "hello, hello"]
    for size in (1, 5, len(ids)):
        choice = choice_of(tokenizer, stop=stop, min_tokens=min_tokens)
        for start in range(0, len(ids), size):
            choice.absorb(output(ids[start : start + size]))
        choice.absorb(output([], "length"))
        assert choice.take().text == wanted


def test_offsets_count_characters_and_not_what_stands_for_their_pieces() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    choice = choice_of(tokenizer, stop=["zz"])
    for token_id in tokenizer.encode("é日本hi", add_special_tokens=False):
        choice.absorb(output([token_id]))
    assert choice.take().offsets == [0, 1, 1, 1, 2, 2, 2, 3, 4]


def test_a_text_that_nearly_stops_all_the_time_is_read_about_twice() -> None:
    num_looks = 0

    class Counting(frozenset[str]):
        def __contains__(self, text: object) -> bool:
            nonlocal num_looks
            num_looks += 1
            return super().__contains__(text)

    stop = StopStrings(["a" * 255 + chr(ord("b") + i) for i in range(20)])
    stop.beginnings = Counting(stop.beginnings)
    matcher = StopMatcher(stop, include_stop=False)
    certain = "".join(matcher.push("a")[0] for _ in range(5000))
    assert certain == "a" * (5000 - 255)
    assert num_looks <= 2 * 5000


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_first_and_last_tokens_are_due_at_once_and_none_twice(interval: int) -> None:
    choice, due = choice_of(TOKENIZERS["byte_level"]), []
    for number in range(8):
        choice.absorb(output([70], "length" if number == 7 else ""))
        due.append(choice.is_due(interval))
        if due[-1]:
            choice.take()
        assert not choice.is_due(interval)
    assert due == [number in (0, 7) or number % interval == 0 for number in range(8)]
