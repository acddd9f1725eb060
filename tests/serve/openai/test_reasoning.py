"""The reasoning of `<think>` models, apart from the content, whole and streamed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PARSERS = ("none", "deepseek_r1", "qwen3")
HI = [{"role": "user", "content": "hi"}]
OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "{{ end | default('<|im_start|>assistant\n') }}{% endif %}"
)


class Thinker:
    """A model of this template that writes any text."""

    def __init__(self, path: Path, chats: Any) -> None:
        self._models = {name: chats(path, reasoning_parser=name) for name in PARSERS}
        self.model = self._models["none"]

    def ask(self, parser: str, text: str, seed: int | None = None, **body: Any) -> dict[str, Any]:
        """Return the message of an answer, or the one that a stream's deltas make up."""
        self.model = self._models[parser]
        self.model.writes(text, rng=None if seed is None else random.Random(seed))
        message: dict[str, Any] = self.model.choice(**body)["message"]
        return message


@pytest.fixture
def thinker(with_template: Any, chats: Any) -> Thinker:
    return Thinker(with_template(TEMPLATE), chats)


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
    thinker: Thinker, parser: str, end: str, text: str, reasoning: str, content: str, stream: bool
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
        max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
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
    [request] = thinker.model.backend.requests
    prompt = thinker.model.tokenizer.decode(request.prompt_token_ids)
    assert "<think>I thought</think>hello" in prompt
