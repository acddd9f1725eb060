"""Our tokenizer gives what transformers gives."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from serve.requests import tokenizer as tokenizer_module
from serve.requests.tokenizer import ChatTemplateError, Tokenizer, TokenizerError, TooManyTokens

TINY = Path(__file__).parents[3] / "examples" / "tiny"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2? Öl 日本"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TINY)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoTokenizer.from_pretrained(str(TINY), local_files_only=True)


@pytest.mark.parametrize("text", ["", "hello world", " a  b\n", "日本 👩‍👧", "<|im_start|>user"])
def test_text_has_the_ids_of_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    for add_special_tokens in (True, False):
        wanted = oracle(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens) == wanted
    for skip in (True, False):
        wanted = oracle.decode(
            tokenizer.encode(text), skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert tokenizer.decode(tokenizer.encode(text), skip) == wanted


def test_a_long_text_is_refused_by_its_pieces_and_else_tokenized_whole(
    tokenizer: Tokenizer, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 1000)
    text = "hello wörld 日本 count to 31. " * 400
    wanted = oracle(text)["input_ids"]
    assert tokenizer.encode(text, max_tokens=len(wanted)) == wanted
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1

    with pytest.raises(TooManyTokens) as raised:
        tokenizer.encode(text, max_tokens=2000, check=check)
    assert 2000 < raised.value.num_tokens < len(wanted)
    assert 1 < num_checks < len(text) / 1000


def test_no_text_has_more_characters_than_its_tokens_stand_for(tokenizer: Tokenizer) -> None:
    for text in ("<|im_start|>" * 50, "hello " * 50, " " * 500, "日本" * 50):
        assert len(text) <= tokenizer.longest_token * len(tokenizer.encode(text))


def test_chat_has_the_ids_of_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    wanted = oracle.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(CHAT) == wanted["input_ids"]


def test_bytes_of_all_tokens_joined_are_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wörld 日本 <|im_end|>")
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert joined.decode() == tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.token_bytes(tokenizer.vocab_size + 1) == b""


def test_end_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((TINY / file).read_bytes())
    own = Tokenizer.from_dir(tmp_path).eos_token_ids
    assert len(own) == 1
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == (7, *own)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, *own]}))
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == (9, *own)


def test_checkpoint_without_a_template_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_dir(tmp_path).apply_chat_template(CHAT)


@pytest.mark.parametrize("where", ["empty", "missing"])
def test_directory_without_a_tokenizer_is_an_error(tmp_path: Path, where: str) -> None:
    path = tmp_path if where == "empty" else tmp_path / "missing"
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        Tokenizer.from_dir(path)


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"hello {i} world " * 50 for i in range(64)]
    wanted = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == wanted
        assert list(pool.map(tokenizer.decode, wanted)) == texts
        chats = list(pool.map(tokenizer.apply_chat_template, [CHAT] * 64))
    assert chats == [tokenizer.apply_chat_template(CHAT)] * 64


def test_importing_the_api_does_not_import_transformers(printed: Any) -> None:
    program = "import serve.openai.app, sys; print('transformers' in sys.modules)"
    assert printed(sys.executable, "-c", program).strip() == "False"
