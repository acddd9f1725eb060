"""The reasoning of `<think>` models, apart from the content, whole and streamed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.arguments import DeployArgs
from serve.config import deploy_config
from serve.openai.app import build_app
from serve.openai.backend import ApiSettings
from serve.openai.endpoint import Serving
from serve.requests.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "{{ end | default('<|im_start|>assistant\n') }}{% endif %}"
)
Ask = Callable[..., httpx.Response]


class Thinker:
    """The app over a backend that writes any text behind a prompt of any end."""

    def __init__(self, backend: Any, tokenizer: Tokenizer, admission: Any, send: Ask) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self._admission = admission
        self._send = send

    def ask(self, parser: str, text: str, seed: int | None = None, **body: Any) -> dict[str, Any]:
        """Return the message of an answer, or the one that a stream's deltas make up."""
        rng = None if seed is None else random.Random(seed)
        self.backend.writes(self.tokenizer, text, rng=rng)
        options = ApiSettings(
            served_model_name="m", max_model_len=4000, args=DeployArgs(reasoning_parser=parser)
        )
        app = build_app(Serving(options, self.backend, lambda: self.tokenizer, self._admission))
        answer = self._send(app, "POST", CHAT, json={"messages": HI, **body})
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            message: dict[str, Any] = answer.json()["choices"][0]["message"]
            return message
        joined = {"content": ""}
        for line in answer.text.split("\n\n")[:-2]:
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            for name in delta.keys() - {"role"}:
                joined[name] = joined.get(name, "") + delta[name]
        return joined


@pytest.fixture
def thinker(with_template: Any, backend: Any, admission: Any, send_to: Ask) -> Thinker:
    return Thinker(backend, with_template(TEMPLATE), admission, send_to)


CASES = [
    ("deepseek_r1", "", "I think\n</think>\n\nhello", "I think", "hello"),
    ("deepseek_r1", "", "<think>\nI think</think>hello", "I think", "hello"),
    ("deepseek_r1", OPENED, "I think", "I think", ""),
    ("deepseek_r1", CLOSED, "hello", "", "hello"),
    ("qwen3", "", "<think>\nI think\n</think>\n\nhello ", "I think", "hello "),
    ("qwen3", "", " hello", "", " hello"),
    ("qwen3", "", "hello <think>x</think>", "", "hello <think>x</think>"),
    ("qwen3", OPENED, "I think</think>hello</think>", "I think", "hello</think>"),
    ("qwen3", CLOSED, "hello", "", "hello"),
    ("qwen3", "", "<think>\n\n</think>\n\nhello", "", "hello"),
    ("qwen3", "", "<think>I th", "I th", ""),
    ("qwen3", "", "<thin", "", "<thin"),
    ("none", OPENED, "I think</think>hello", "", "I think</think>hello"),
]


@pytest.mark.feature("R10")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parser", "end", "text", "reasoning", "content"), CASES)
def test_reasoning_stands_beside_the_content(
    thinker: Thinker,
    parser: str,
    end: str,
    text: str,
    reasoning: str,
    content: str,
    stream: bool,
) -> None:
    kwargs = {"end": end} if end else {}
    message = thinker.ask(parser, text, stream=stream, chat_template_kwargs=kwargs)
    assert (message.get("reasoning", ""), message["content"] or "") == (reasoning, content)
    assert message.get("reasoning_content", "") == reasoning
    left_out = thinker.ask(
        parser, text, stream=stream, chat_template_kwargs=kwargs, include_reasoning=False
    )
    assert (left_out.get("reasoning"), left_out["content"] or "") == (None, content)


def test_streamed_and_whole_are_equal_however_the_text_is_cut(thinker: Thinker) -> None:
    parts = ["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "hello", "<", ">"]

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        text=st.lists(st.sampled_from(parts), max_size=12).map("".join),
        end=st.sampled_from([OPENED, CLOSED, "x"]),
        parser=st.sampled_from(["deepseek_r1", "qwen3"]),
        seed=st.integers(0, 999),
    )
    def check(text: str, end: str, parser: str, seed: int) -> None:
        asked = {"chat_template_kwargs": {"end": end}}
        whole = thinker.ask(parser, text, **asked)
        streamed = thinker.ask(parser, text, seed, stream=True, **asked)
        for name in ("content", "reasoning", "reasoning_content"):
            assert (whole.get(name) or "") == (streamed.get(name) or "")

    check()


def test_a_prompt_that_speaks_of_thinking_opens_nothing(thinker: Thinker) -> None:
    asked = [{"role": "user", "content": "what is <think>"}]
    message = thinker.ask("qwen3", "hello</think>", messages=asked)
    assert (message["content"], message.get("reasoning")) == ("hello</think>", None)


def test_a_continued_message_goes_on_with_its_reasoning(thinker: Thinker) -> None:
    turns = [*HI, {"role": "assistant", "content": "<think>so far, so"}]
    message = thinker.ask(
        "qwen3", " good</think>hello", messages=turns, continue_final_message=True
    )
    assert (message["content"], message["reasoning"]) == ("hello", "good")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_back_into_templates_that_write_it(thinker: Thinker, name: str) -> None:
    turns = [*HI, {"role": "assistant", "content": "hello", name: "I thought"}, *HI]
    thinker.ask("qwen3", "hello", messages=turns)
    prompt = thinker.tokenizer.decode(thinker.backend.requests[-1].prompt_token_ids)
    assert "<think>I thought</think>hello" in prompt


def test_parsers_are_arguments_of_deploy() -> None:
    config = deploy_config({"reasoning_parser": "qwen3", "tool_call_parser": "hermes"})
    assert (config.args.reasoning_parser, config.args.tool_call_parser) == ("qwen3", "hermes")
    for name in ("reasoning_parser", "tool_call_parser"):
        with pytest.raises(ValueError, match=f"{name}: wanted one of"):
            deploy_config({name: "gpt"})
