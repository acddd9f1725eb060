"""Structured output through the offline API: every answer fits, or was cut by its length."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RustTokenizer

from cluster.grammar import masks as grammar_masks
from cluster.wire.messages import EngineOutput, GenerateRequest, Submit
from compile.errors import FieldError
from serve.config import bundled_model
from serve.llm import LLM, GenerationError, RequestOutput, SamplingParams, StructuredOutputsParams
from serve.requests.grammar_process import GrammarProcess

pytestmark = pytest.mark.feature("R09")

SIZES: dict[str, Any] = {"max_num_seqs": 8, "dtype": "float32", "kv_memory": "64MiB"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["Count from 3 to 9.", "What is 12 + 30?", "Sort 5 2 9.", "Hello"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(enforce_eager=True, **SIZES)


def generate(
    llm: LLM, wanted: dict[str, Any], n: int = 4, prompt: str = PROMPTS[0], **fields: Any
) -> list[tuple[str, str]]:
    """Return the texts of `n` choices and how they ended."""
    params = SamplingParams(
        n=n,
        structured_outputs=StructuredOutputsParams(**wanted),
        **{"max_tokens": 100, "seed": 5, **fields},
    )
    [output] = llm.generate(prompt, params)
    return [(choice.text, str(choice.finish_reason)) for choice in output.outputs]


def fits(schema: Any, text: str) -> bool:
    """Return whether a text is JSON that a schema describes."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{3,5}x"}, "[a-c]{3,5}x"),
        ({"choice": ["red", 'a "b"\\\n', "<|im_end|>"]}, r'(red|a "b"\\\n|<\|im_end\|>)'),
        ({"grammar": 'start: "a" /[0-9]{2,4}/ | "bé"'}, "(a[0-9]{2,4}|bé)"),
        ({"grammar": 'root ::= "x" [0-4] [0-4]? "y"'}, "x[0-4]{1,2}y"),
        ({"json": '{"enum": ["p", 17, null]}'}, r'\s*("p"|17|null)\s*'),
    ],
)  # fmt: skip
def test_each_form_holds_the_text_and_ends_it(
    llm: LLM, wanted: dict[str, Any], pattern: str
) -> None:
    found = generate(llm, wanted, skip_special_tokens=False)
    for text, reason in found:
        assert re.fullmatch(pattern + r"(<\|im_end\|>|<\|endoftext\|>)?", text), text
        assert reason == "stop"


def test_a_schema_and_any_object_hold_the_text(llm: LLM) -> None:
    found = generate(llm, {"json": PERSON}, n=8, max_tokens=300)
    assert sum(reason == "stop" for _, reason in found) >= 6
    for text, reason in found:
        assert reason == "length" or fits(PERSON, text), text
    ended = 0
    for text, reason in generate(llm, {"json_object": True}, n=16, temperature=1.5):
        assert text.lstrip().startswith("{")
        ended += reason == "stop"
        assert reason == "length" or fits({"type": "object"}, text)
    assert ended


def test_an_end_token_comes_exactly_where_the_text_may_end(llm: LLM) -> None:
    """A bias for the end token makes each text as short as it may be, one against it as long."""
    ends = dict.fromkeys(llm.tokenizer.eos_token_ids, 100.0)
    shortest = generate(llm, {"regex": "(ab){3,20}"}, logit_bias=ends)
    assert shortest == [("ababab", "stop")] * 4
    for token in ends:  # the model has two, and each will do
        one = {**dict.fromkeys(ends, -100.0), token: 100.0}
        assert generate(llm, {"regex": "(ab){3,20}"}, logit_bias=one) == shortest
    never = {token: -100.0 for token in ends}
    longest = generate(llm, {"regex": "(ab){3,20}"}, logit_bias=never)
    assert longest == [("ab" * 20, "stop")] * 4
    assert {reason for _, reason in generate(llm, {"regex": "(ab){300}"}, max_tokens=9)} == {
        "length"
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
        {"logit_bias": {i: -100.0 for i in range(90, 120)}},
        {"stop": ["17"], "include_stop_str_in_output": True},
        {"logprobs": 3, "temperature": 2.0},
    ],
)
def test_other_parameters_choose_among_what_is_allowed(llm: LLM, fields: dict[str, Any]) -> None:
    for text, reason in generate(llm, {"json": {"enum": ["zebra", 17, [True]]}}, **fields):
        assert reason == "stop"
        assert json.loads(text) in ("zebra", 17, [True])


def test_logprobs_are_those_of_the_raw_logits(llm: LLM) -> None:
    """The first token's are what they are without a grammar, whatever that allows."""
    first = []
    for wanted in (None, StructuredOutputsParams(regex="zq")):
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, structured_outputs=wanted)
        [output] = llm.generate(PROMPTS[1], params)
        first.append(output.outputs[0].logprobs[0])
    assert first[0].top_token_ids == first[1].top_token_ids
    assert first[0].top_logprobs == pytest.approx(first[1].top_logprobs, abs=1e-4)
    assert first[0].rank == 1 < first[1].rank


def fields(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -7, "maximum": 4000},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "pattern": "^([0-9]{3}-[A-Z]+)$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"enum": ["é", "", -5, True, None]},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "ipv4"}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    fields({"é a": {"type": "boolean"}, "b_": {"enum": [1, 2]}}, required=["b_"]),
    fields({"in": fields({"x": {"type": "array", "items": {"enum": [1]}, "maxItems": 1}})}),
]


def test_answers_to_schemas_of_all_kinds_in_one_batch_fit_them(llm: LLM) -> None:
    params = [
        SamplingParams(
            n=4, max_tokens=60, seed=5, structured_outputs=StructuredOutputsParams(json=schema)
        )
        for schema in SCHEMAS
    ]
    num_whole = 0
    for schema, output in zip(
        SCHEMAS, llm.generate(PROMPTS[:1] * len(params), params), strict=True
    ):
        for choice in output.outputs:
            num_whole += choice.finish_reason == "stop"
            assert choice.finish_reason == "length" or fits(schema, choice.text), choice.text
    assert num_whole > 30, "most are not cut"


# --- the state follows from grammar and output ---


def batch(seed: int) -> list[SamplingParams]:
    forms: list[dict[str, Any] | None] = [{"json": PERSON}, {"regex": "([a-d]{4} ){12}"}, None]
    return [
        SamplingParams(
            n=2,
            max_tokens=60,
            seed=seed + i,
            structured_outputs=None if form is None else StructuredOutputsParams(**form),
        )
        for i, form in enumerate(forms)
    ]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def test_preempted_sequences_go_on_in_their_grammar(llm: LLM) -> None:
    small = LLM(
        enforce_eager=True, **{**SIZES, "max_model_len": 128, "block_size": 4, "num_kv_blocks": 40}
    )
    wanted = tokens(llm.generate(PROMPTS[:3], batch(1)))
    assert tokens(small.generate(PROMPTS[:3], batch(1))) == wanted
    assert small.engine.scheduler.stats().num_preemptions


@pytest.mark.feature("T04")
def test_a_loop_that_plans_ahead_draws_the_same(llm: LLM) -> None:
    overlapped = LLM(enforce_eager=True, overlap="on", **SIZES)
    for seed in (1, 7):
        wanted = tokens(llm.generate(PROMPTS[:3], batch(seed)))
        assert tokens(overlapped.generate(PROMPTS[:3], batch(seed))) == wanted


@pytest.mark.feature("T05")
@pytest.mark.parametrize("is_slow", [False, True])
def test_drafts_are_checked_against_the_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Masks are those behind each draft token, however they are filled, and the matcher goes on
    from what was accepted."""
    monkeypatch.setattr(grammar_masks, "SLOW_FILL_S", -1.0 if is_slow else 60.0)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    drafting = LLM(enforce_eager=True, speculative_config=ngram, **SIZES)
    for seed in (1, 7):
        wanted = tokens(llm.generate(PROMPTS[:3], batch(seed)))
        assert tokens(drafting.generate(PROMPTS[:3], batch(seed))) == wanted
    # What a grammar forces is said again and again.
    before = drafting.engine.scheduler.stats().num_accepted_tokens
    forced = {"regex": "(ab, ba; ){9}"}
    assert generate(drafting, forced) == generate(llm, forced)
    assert drafting.engine.scheduler.stats().num_accepted_tokens > before + 20


def run(llm: LLM, request: GenerateRequest) -> list[EngineOutput]:
    llm.engine.submit(Submit(request, None))
    outputs: list[EngineOutput] = []
    while llm.engine.has_unfinished:
        outputs += llm.engine.step()
    return outputs


def request_of(llm: LLM, wanted: dict[str, Any], max_tokens: int = 60) -> GenerateRequest:
    """Return what the front end makes of a request."""
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(**wanted), max_tokens=max_tokens, seed=3
    )
    _, [choice] = llm._prepare(PROMPTS[0], params)
    return choice.request


def test_a_request_that_is_resumed_goes_on_in_its_grammar(llm: LLM) -> None:
    request = request_of(llm, {"json": PERSON})
    whole = [token for output in run(llm, request) for token in output.token_ids]
    assert len(whole) > 10
    for cut in range(1, len(whole), 3):
        resumed = msgspec.structs.replace(
            request, request_id=f"cut-{cut}", output_token_ids=whole[:cut]
        )
        rest = [token for output in run(llm, resumed) for token in output.token_ids]
        assert whole[:cut] + rest == whole


def test_output_that_does_not_fit_ends_with_an_error_that_says_so(llm: LLM) -> None:
    request = request_of(llm, {"regex": "[0-9]{8}"})
    alien = llm.tokenizer.encode("zz", add_special_tokens=False)
    bad = msgspec.structs.replace(request, request_id="bad", output_token_ids=alien)
    [output] = run(llm, bad)
    assert output.finish_reason == "error" and output.error.startswith("grammar: ")
    [good] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=3))
    assert good.outputs[0].token_ids
    # A text that fits so far, and that nothing can go on from.
    with pytest.raises(GenerationError, match="grammar: "):
        generate(llm, {"grammar": 'start: "a" /[^\\s\\S]/'})
    assert generate(llm, {"regex": "[0-9]{8}x"})[0][1] == "stop"


# --- what is refused ---


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "(("}, "structured_outputs.regex: .*unclosed|invalid regex"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex: .*regex"),
        ({"json": {"not": {"type": "null"}}}, r'structured_outputs.json: .*Unimplemented.*"not"'),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "Unimplemented"),
        ({"json": {"type": "strng"}}, "structured_outputs.json: .*strng"),
        ({"json": "{"}, "structured_outputs.json: .*not JSON"),
        ({"json": "[]"}, "structured_outputs.json: .*list"),
        ({"json": {"$ref": "http://localhost/x"}}, "structured_outputs.json"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"json": {"enum": ["x" * 70_000]}}, "structured_outputs.json: wanted at most 65536"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice: wanted texts of at least one"),
        ({"choice": ["a"] * 60_000}, "structured_outputs.choice: wanted at most 262144"),
        ({"grammar": "start: nowhere"}, "structured_outputs.grammar: .*nowhere"),
        ({"grammar": "root ::= nowhere"}, "structured_outputs.grammar: .*nowhere"),
        ({"grammar": "root ::= " + "(" * 9999}, "structured_outputs.grammar"),
        ({"grammar": "start: start"}, "structured_outputs.grammar: .*no text fits"),
        ({"grammar": 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'}, "Unimplemented"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({}, "structured_outputs: wanted one of"),
        ({"regex": "a", "json_object": True}, "structured_outputs: wanted one of"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(
    llm: LLM, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        generate(llm, wanted)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("field", "value"), [("ignore_eos", True), ("min_tokens", 2), ("allowed_token_ids", [5])]
)
def test_what_would_leave_no_token_is_refused_by_name(llm: LLM, field: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"{field}: wanted none with structured output"):
        generate(llm, {"regex": "a"}, **{field: value})


def test_compiled_grammars_are_kept_up_to_a_bound(llm: LLM) -> None:
    assert llm.runner.grammars is not None
    cache = llm.runner.grammars._cache
    many = grammar_masks.MAX_CACHED + 40
    params = [
        SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"[a-c]{i}"), max_tokens=1)
        for i in range(many)
    ]
    llm.generate([PROMPTS[3]] * many, params)
    assert len(cache) == grammar_masks.MAX_CACHED
    last = [text for text in cache if f"[a-c]{many - 1}" in text]
    first = [text for text in cache if "[a-c]0/" in text]
    assert last and not first


# --- SentencePiece's kind of tokenizer: spaces within words, bytes as tokens ---

# The weights are the bundled model's, to which these tokens mean nothing: texts are as good as
# random, and fit all the same.
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
def llama(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama", *OF_LLAMA)
    return LLM(path, max_num_seqs=8, dtype="float32", kv_memory="64MiB", enforce_eager=True)


def texts(llama: LLM, wanted: dict[str, Any]) -> list[str]:
    """Return the texts of some choices that have ended."""
    found = generate(llama, wanted, 8, "a the", seed=3, temperature=1.0, max_tokens=200)
    ended = [text for text, reason in found if reason == "stop"]
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
    llama: LLM, wanted: dict[str, Any], pattern: str
) -> None:
    for text in texts(llama, wanted):
        assert re.fullmatch(pattern, text), text


def test_a_schema_holds_such_a_text(llama: LLM) -> None:
    for text in texts(llama, {"json": SCHEMA}):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_decoder_of_which_the_grammar_library_knows_nothing_is_refused(tmp_path: Path) -> None:
    """It would take U+2581 for itself, and let texts through that do not fit."""
    path = checkpoint(tmp_path / "metaspace", decoders.ByteFallback(), decoders.Metaspace())
    tried = GrammarProcess(path).compile(StructuredOutputsParams(regex="[^ ]{3}"))
    assert re.search("tokenizer: wanted .* found Metaspace", str(tried.found))
