"""Deltas joined are the whole text, however tokens and characters are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from serve.requests.sampling import SamplingParams
from serve.requests.text import StopMatcher, StopStrings, TextStream
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


def stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    stop: list[str] | None = None,
    include_stop: bool = False,
    skip_special_tokens: bool = True,
    cuts: random.Random | None = None,
    prompt: Sequence[int] = (),
) -> tuple[list[str], str | None, int]:
    """Push in pieces; return the deltas, the stop string, and how many tokens were used."""
    params = SamplingParams(
        stop=stop or [],
        include_stop_str_in_output=include_stop,
        skip_special_tokens=skip_special_tokens,
    )
    text = TextStream(tokenizer, params, StopStrings(params.stop_strings), prompt)
    deltas: list[str] = []
    num_used = 0
    while num_used < len(token_ids):
        size = cuts.randint(1, 5) if cuts else 1
        delta = text.push(token_ids[num_used : num_used + size])
        deltas.append(delta.text)
        num_used += delta.num_tokens_used
        if delta.stop_string is not None:
            assert (text.finish(), text.stop_string) == ("", delta.stop_string)
            return deltas, delta.stop_string, num_used
    return [*deltas, text.finish()], text.stop_string, num_used


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
def test_deltas_of_any_tokens_are_the_whole_decoding(
    name: str, data: st.DataObject, seed: random.Random, skip: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(IDS[name], max_size=40))
    deltas, _, _ = stream(tokenizer, token_ids, skip_special_tokens=skip, cuts=seed)
    assert "".join(deltas) == decoded(tokenizer, token_ids, skip)


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
    token_ids = data.draw(st.lists(IDS[name], max_size=20))
    before = decoded(tokenizer, prompt, skip)
    whole = decoded(tokenizer, [*prompt, *token_ids], skip)
    assert whole.startswith(before)
    deltas, _, _ = stream(tokenizer, token_ids, skip_special_tokens=skip, cuts=seed, prompt=prompt)
    assert "".join(deltas) == whole[len(before) :]


def test_a_word_behind_a_prompt_keeps_its_space_and_a_stop_string_finds_it() -> None:
    tokenizer = TOKENIZERS["sentence_piece"]
    word, ll, o, byte = (tokenizer._rust.token_to_id(t) for t in ("▁he", "ll", "o", "<0xC3>"))
    prompt, ids = [word], [word, ll, o]
    assert stream(tokenizer, ids)[0][0] == "he"
    assert stream(tokenizer, ids, prompt=prompt)[0][0] == " he"
    # What the output may go on with is no context, what stands before it is.
    assert stream(tokenizer, ids, prompt=[*prompt, byte])[0][0] == " he"
    assert stream(tokenizer, ids, prompt=prompt, stop=[" he"])[:2] == ([""], " he")


@BOTH
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), seed=st.randoms(use_true_random=False))
def test_deltas_of_encoded_text_are_the_text(name: str, text: str, seed: random.Random) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, _, _ = stream(tokenizer, token_ids, cuts=seed)
    assert "".join(deltas) == decoded(tokenizer, token_ids)
    if name == "byte_level":
        assert "".join(deltas) == text


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
    wanted, wanted_stop = cut(decoded(tokenizer, token_ids), stop, include)
    deltas, stop_string, _ = stream(
        tokenizer, token_ids, stop=stop, include_stop=include, cuts=seed
    )
    assert ("".join(deltas), stop_string) == (wanted, wanted_stop)


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


def test_text_arrives_with_the_token_that_completes_its_character() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    deltas, _, _ = stream(tokenizer, tokenizer.encode("日本 hi", add_special_tokens=False))
    assert deltas == ["", "", "日", "", "", "本", " ", "h", "i", ""]


def test_unfinished_character_becomes_the_replacement_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = tokenizer.encode("hi日", add_special_tokens=False)[:-1]
    assert stream(tokenizer, token_ids)[0] == ["h", "i", "", "", "�"]


def test_characters_made_of_bytes_arrive_when_they_are_complete() -> None:
    tokenizer = TOKENIZERS["sentence_piece"]

    def ids(*tokens: str) -> list[int]:
        return [tokenizer._rust.token_to_id(token) for token in tokens]

    newlines = ids("▁he", "<0x0A>", "<0x0A>", "▁he")
    assert stream(tokenizer, newlines)[0] == ["he", "\n", "\n", " he", ""]
    assert stream(tokenizer, newlines, stop=["\n"]) == (["he", ""], "\n", 2)
    umlauts = ids("<0xC3>", "<0xBC>", "<0xC3>", "<0xBC>", "<0xC3>", "▁he")
    assert stream(tokenizer, umlauts)[0] == ["", "ü", "", "ü", "", "� he", ""]
    assert stream(tokenizer, ids("<0xC3>", "<0x0A>", "<0xBC>"))[0] == ["", "", "", "���"]


def test_leading_space_of_later_words_is_kept() -> None:
    tokenizer = TOKENIZERS["sentence_piece"]
    token_ids = [tokenizer._rust.token_to_id(token) for token in ("▁he", "▁w", "▁", "▁he")]
    assert stream(tokenizer, token_ids)[0] == ["he", " w", " ", " he", ""]


def test_token_that_completes_a_stop_string_is_the_last_one_used() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = tokenizer.encode("hi END more", add_special_tokens=False)
    end = StopStrings(["END"])
    text = TextStream(tokenizer, SamplingParams(), end)
    delta = text.push(token_ids)
    assert (delta.text, delta.stop_string) == ("hi ", "END")
    assert tokenizer.decode(token_ids[: delta.num_tokens_used]) == "hi END"
    assert text.push(token_ids).num_tokens_used == 0


@pytest.mark.parametrize("include", [False, True])
def test_token_that_ended_the_sequence_has_text_only_when_included(include: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    none = StopStrings([])
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
    text = TextStream(tokenizer, params, none)
    delta = text.push([*tokenizer.encode("h", add_special_tokens=False), end], stop_token_id=end)
    assert delta.text + text.finish() == ("h<|im_end|>" if include else "h")
    assert delta.num_tokens_used == 2


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

    counting = Counting(tokenizer._hf, ())
    token_ids = [byte] * 5000 + [special] * 5000
    deltas, _, _ = stream(counting, token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids)
    assert num_decodes <= 3 * len(token_ids)


def test_bundled_tokenizer_streams_what_it_decodes() -> None:
    path = Path(__file__).parents[3] / "examples" / "tiny"
    tokenizer = Tokenizer.from_dir(path)
    rng = random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        deltas, _, _ = stream(tokenizer, token_ids, cuts=rng)
        assert "".join(deltas) == tokenizer.decode(token_ids)


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
        params = SamplingParams(min_tokens=min_tokens, max_tokens=None)
        stream = TextStream(tokenizer, params, StopStrings(stop))
        text = ""
        for start in range(0, len(ids), size):
            text += stream.push(ids[start : start + size]).text
        assert text + stream.finish() == wanted


def test_offsets_count_characters_and_not_what_stands_for_their_pieces() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("é日本hi", add_special_tokens=False)
    stream = TextStream(tokenizer, SamplingParams(), StopStrings(["zz"]))
    found = [offset for token_id in ids for offset in stream.push([token_id]).offsets]
    assert found == [0, 1, 1, 1, 2, 2, 2, 3, 4]


def test_a_text_that_nearly_stops_all_the_time_is_read_once() -> None:
    steps = 0

    class Counting(StopStrings):
        def step(self, node: int, char: str) -> int:
            nonlocal steps
            steps += 1
            return super().step(node, char)

    stop = Counting(["a" * 255 + chr(ord("b") + i) for i in range(20)])
    matcher, steps = StopMatcher(stop, include_stop=False), 0
    certain = "".join(matcher.push("a")[0] for _ in range(5000))
    assert certain == "a" * (5000 - 255)
    assert steps == 5000
