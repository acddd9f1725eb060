"""Structured output with SentencePiece's kind of tokenizer: spaces within words, bytes as tokens.

The weights are the bundled model's, to which these tokens mean nothing: texts are as good as
random, and fit all the same.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RustTokenizer

from serve.config import bundled_model
from serve.llm import LLM, SamplingParams, StructuredOutputsParams
from serve.requests.grammar_process import GrammarProcess

pytestmark = pytest.mark.feature("R09")

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = list('▁abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-_é')
WORDS = ["▁▁", '":', '▁"', "▁a", "▁the", "▁red", "red", "th", "the", "ab", "true", "日本", "éé"]
OF_LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name é": {"enum": ["red é", "日本 a", " the"]},
        "text": {"type": "string", "maxLength": 6},
        "is it": {"type": "boolean"},
    },
    "required": ["name é", "text", "is it"],
    "additionalProperties": False,
}


def checkpoint(path: Path, *decoder: Any) -> Path:
    """Return a checkpoint of the bundled weights with such a tokenizer."""
    shutil.copytree(bundled_model(), path)
    tokens = [*SPECIAL, *BYTES, *LETTERS, *WORDS]
    vocab = {token: i for i, token in enumerate(tokens)}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(list(decoder))
    rust.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    rust.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama", *OF_LLAMA)
    return LLM(path, max_num_seqs=8, dtype="float32", kv_memory="64MiB", enforce_eager=True)


def texts(llm: LLM, wanted: dict[str, Any]) -> list[str]:
    """Return the texts of some choices that have ended."""
    params = SamplingParams(
        n=8,
        seed=3,
        temperature=1.0,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(**wanted),
    )
    [output] = llm.generate("a the", params)
    ended = [choice.text for choice in output.outputs if choice.finish_reason == "stop"]
    assert len(ended) >= 4
    return ended


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[ab]{3}é日 the? red"}, "[ab]{3}é日 the? red"),
        ({"regex": " {1,3}the  red"}, " {1,3}the  red"),
        ({"regex": "[日-月]{3}\\n"}, "[日-月]{3}\\n"),
        ({"choice": [" red", "the", "日本語 x"]}, "( red|the|日本語 x)"),
        ({"grammar": 'start: WORD (" " WORD)~2\nWORD: /[a-é]{1,3}/'}, "[a-é]{1,3}( [a-é]{1,3})+"),
    ],
)  # fmt: skip
def test_spaces_within_tokens_and_bytes_are_matched_as_text(
    llm: LLM, wanted: dict[str, Any], pattern: str
) -> None:
    for text in texts(llm, wanted):
        assert re.fullmatch(pattern, text), text


def test_a_schema_holds_such_a_text(llm: LLM) -> None:
    for text in texts(llm, {"json": SCHEMA}):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_decoder_of_which_the_grammar_library_knows_nothing_is_refused(tmp_path: Path) -> None:
    """It would take U+2581 for itself, and let texts through that do not fit."""
    path = checkpoint(tmp_path / "metaspace", decoders.ByteFallback(), decoders.Metaspace())
    tried = GrammarProcess(path).compile(StructuredOutputsParams(regex="[^ ]{3}"))
    assert re.search("tokenizer: wanted .* found Metaspace", str(tried.found))
