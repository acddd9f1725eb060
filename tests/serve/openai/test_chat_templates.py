"""Chat templates give what transformers gives, and run nothing that a client sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.requests.tokenizer import ChatTemplateError, Tokenizer

pytestmark = pytest.mark.feature("R11")

TURNS = [
    {"role": "user", "content": "hello "},
    {"role": "assistant", "content": " the cat"},
    {"role": "user", "content": "again\n"},
]
SYSTEM = [{"role": "system", "content": "be brief"}, *TURNS]

# In the manner of five families: what they do with spaces, roles, system messages and variables.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "trimming, with a text's beginning": (
        "{{ bos_token }}{%- for m in messages %}"
        "{{- '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
    ),
    "brackets, strict turns": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
        "{% elif m.role == 'user' %}[INST] {{ ns.system }}{{ m.content }} [/INST]"
        "{% set ns.system = '' %}"
        "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
        "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    ),
    "renamed roles, no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}"
        "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
    ),
    "thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.type }}]{{ part.text }}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% endif %}{% for word in words | default([]) %}{{ word | tojson }} {% endfor %}"
        "{% endif %}"
    ),
}


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    return TEMPLATES[request.param]


@pytest.fixture
def api(with_template: Callable[..., Path], chats: Any) -> Any:
    return lambda template, **named: chats(with_template(template, **named))


def wanted_ids(api: Any, messages: list[Any], **kwargs: Any) -> list[int]:
    text = api.oracle.apply_chat_template(messages, tokenize=False, **kwargs)
    found: list[int] = api.oracle(text, add_special_tokens=False)["input_ids"]
    return found


def test_the_names_of_speakers_reach_a_template_that_writes_them(api: Any) -> None:
    found = api("{% for m in messages %}{{ m.name | default('?') }}: {{ m.content }}\n{% endfor %}")
    named = [{**turn, "name": name} for turn, name in zip(TURNS, ("Ann", "Bob"), strict=False)]
    for messages in (named, [*named, TURNS[2]], TURNS):
        assert found.prompt_ids(messages=messages) == wanted_ids(found, messages)
    assert found.prompt_ids(messages=named) != found.prompt_ids(messages=TURNS[:2])


def test_prompt_is_that_of_transformers(api: Any, template: str) -> None:
    made = api(template)
    for messages in (TURNS, SYSTEM, TURNS[:1]):
        try:
            wanted = wanted_ids(made, messages, add_generation_prompt=True)
        except Exception as error:
            answer = made.post(messages=messages)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
            assert str(error) in answer.json()["error"]["message"]
        else:
            assert made.prompt_ids(messages=messages) == wanted
            wanted = wanted_ids(made, messages)
            assert made.prompt_ids(messages=messages, add_generation_prompt=False) == wanted


def test_final_message_is_continued_like_in_transformers(api: Any, template: str) -> None:
    made = api(template)
    messages = TURNS[:2]
    wanted = wanted_ids(made, messages, continue_final_message=True)
    assert made.prompt_ids(messages=messages, continue_final_message=True) == wanted
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert made.prompt_ids(messages=messages, **fields) == wanted
    assert made.oracle.decode(wanted).endswith("the cat")
    answer = made.post(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert answer.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    "kwargs", [{"enable_thinking": False}, {"enable_thinking": True}, {"words": ["a", {"b": 1}]}]
)
def test_template_kwargs_reach_the_template(api: Any, kwargs: dict[str, Any]) -> None:
    made = api(TEMPLATES["thinking"])
    found = made.prompt_ids(messages=TURNS, chat_template_kwargs=kwargs)
    assert found == wanted_ids(made, TURNS, add_generation_prompt=True, **kwargs)
    assert (found != made.prompt_ids(messages=TURNS)) == (kwargs != {"enable_thinking": True})


def test_parts_reach_a_template_that_reads_parts(api: Any) -> None:
    made = api(TEMPLATES["thinking"])
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": " cat"}]
    messages = [{"role": "user", "content": parts}]
    found = made.prompt_ids(messages=messages)
    assert found == wanted_ids(made, messages, add_generation_prompt=True)
    assert "[text]the[text] cat" in made.oracle.decode(found)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "thinking"])
def test_parts_are_joined_for_a_template_that_reads_text(api: Any, name: str) -> None:
    made = api(TEMPLATES[name])
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]
    found = made.prompt_ids(messages=[{"role": "user", "content": parts}])
    joined = [{"role": "user", "content": "the\ncat"}]
    assert found == wanted_ids(made, joined, add_generation_prompt=True)


def test_the_bundled_template_reads_parts(tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_checkpoint)
    assert tokenizer.takes_parts()


def test_a_clients_template_is_refused_and_a_named_one_taken(api: Any) -> None:
    made = api(TEMPLATES["chatml"], short="{% for m in messages %}{{ m.content }}{% endfor %}")
    found = made.prompt_ids(messages=TURNS, chat_template="short")
    assert made.oracle.decode(found) == "hello  the catagain\n"
    assert made.prompt_ids(messages=TURNS) == wanted_ids(made, TURNS, add_generation_prompt=True)
    for text in ("{{ 1 }}", "", "long", "{% for i in range(9**9) %}{% endfor %}"):
        answer = made.post(messages=TURNS, chat_template=text)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "chat_template" and "default, short" in error["message"]


def test_without_names_no_template_is_taken(api: Any) -> None:
    made = api(TEMPLATES["chatml"])
    error = made.post(messages=TURNS, chat_template="default").json()["error"]
    assert error["param"] == "chat_template" and "without a name" in error["message"]


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt", "self"]
)
def test_template_kwargs_are_variables_only(api: Any, name: str) -> None:
    made = api(TEMPLATES["chatml"])
    answer = made.post(messages=TURNS, chat_template_kwargs={name: "{{ 1 }}"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


def test_special_tokens_are_added_when_asked(tmp_path: Path, tiny_checkpoint: Path) -> None:
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_bytes((tiny_checkpoint / file).read_bytes())
    rust = json.loads((tiny_checkpoint / "tokenizer.json").read_text())
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    rust["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(rust))
    tokenizer = Tokenizer.from_dir(tmp_path)
    plain = tokenizer.apply_chat_template(TURNS)
    assert tokenizer.apply_chat_template(TURNS, add_special_tokens=True) == [0, *plain]


def test_templates_run_in_a_sandbox(with_template: Callable[..., Path]) -> None:
    """Those of a checkpoint: transformers' environment gives them no way into Python."""
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = Tokenizer.from_dir(with_template(escape))
    with pytest.raises(ChatTemplateError, match="refuses"):
        tokenizer.apply_chat_template(TURNS)
