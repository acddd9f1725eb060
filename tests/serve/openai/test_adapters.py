"""Requests that name a LoRA adapter: by HTTP as a model, in process by `lora_request`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters import two_adapters

from compile.errors import FieldError
from serve.admission import Admission
from serve.config import DeployConfig, deploy_config
from serve.llm import LLM, SamplingParams
from serve.openai.app import build_app
from serve.openai.generation import Serving

PROMPT = [70 + i % 9 for i in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NAMES = (None, "plain", "stable")
PATHS = ("completions", "chat/completions", "responses")


@dataclass
class Adapted:
    llm: LLM
    config: DeployConfig
    models: list[Any]
    """transformers': without an adapter, and with each of them merged."""

    @torch.inference_mode()
    def wanted(self, name: str | None) -> list[int]:
        """Return the greedy tokens of transformers' model with this adapter."""
        model, ids = self.models[NAMES.index(name)], list(PROMPT)
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def adapted(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    paths, merged = two_adapters(tmp_path_factory.mktemp("adapters"), model.eval())
    options = {
        "lora_modules": ",".join(f"{path.name}={path}" for path in paths),
        **{"dtype": "float32", "device": "cpu", "kv_memory": "64MiB", "threads_per_rank": 1},
    }
    llm = LLM(tiny_checkpoint, compilation_config=0, **options)  # type: ignore[arg-type]
    config = deploy_config({**options, "served_model_name": "tiny,also"})
    return Adapted(llm, config, [model, *merged])


@pytest.fixture
def call(adapted: Adapted, admission: Admission, send_to: Any, backend_of: Any) -> Any:
    llm, settings = adapted.llm, adapted.config.api
    serving = Serving(settings, backend_of(llm.engine), lambda: llm.tokenizer, admission)
    app = build_app(serving)
    return lambda method, path, **kwargs: send_to(app, method, path, **kwargs)


@pytest.mark.feature("S10")
def test_prompts_of_one_call_have_adapters_of_their_own(adapted: Adapted) -> None:
    """And what one adapter has left in the prefix cache, another does not find."""
    llm, names = adapted.llm, [*NAMES, "plain", None]
    outputs = llm.generate([PROMPT] * 5, GREEDY, lora_request=names)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [adapted.wanted(name) for name in names]
    assert len({tuple(tokens) for tokens in found}) == 3
    salted: Any = {"prompt_token_ids": PROMPT, "cache_salt": "new"}
    for num_cached in (0, 32):
        for name in NAMES:
            [output] = llm.generate(salted, GREEDY, lora_request=name)
            assert output.num_cached_tokens == num_cached
            assert output.outputs[0].token_ids == adapted.wanted(name)


def test_an_adapter_that_is_not_there_leaves_nothing_behind(adapted: Adapted) -> None:
    llm = adapted.llm
    with pytest.raises(ValueError, match=r"^lora_request: wanted plain, stable, found other"):
        llm.generate([PROMPT] * 2, GREEDY, lora_request=["plain", "other"])
    with pytest.raises(ValueError, match=r"^lora_request: wanted 2, one per prompt, found 1"):
        llm.generate([PROMPT] * 2, GREEDY, lora_request=["plain"])
    assert not llm.engine.has_unfinished


@pytest.mark.feature("S10")
def test_a_request_names_an_adapter_as_its_model(adapted: Adapted, call: Any) -> None:
    for name in ("tiny", "also", "plain", "stable"):
        body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = call("POST", "/v1/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        adapter = name if name in NAMES else None
        wanted = adapted.llm.tokenizer.decode(adapted.wanted(adapter))
        assert answer.json()["choices"][0]["text"] == wanted
        assert answer.json()["model"] == (adapter or "tiny")


@pytest.mark.feature("S10")
@pytest.mark.parametrize("path", PATHS)
def test_each_endpoint_knows_adapters(call: Any, path: str) -> None:
    body: dict[str, Any] = {
        "completions": {"prompt": "1 2", "max_tokens": 2},
        "chat/completions": {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2},
        "responses": {"input": "1", "max_output_tokens": 2, "store": False},
    }[path]
    answer = call("POST", f"/v1/{path}", json={**body, "model": "stable"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "stable"
    answer = call("POST", f"/v1/{path}", json={**body, "model": "other"})
    assert answer.status_code == 404
    assert "wanted tiny or also or plain or stable, found other" in answer.text


@pytest.mark.feature("S10")
def test_adapters_are_listed_with_the_model_that_they_are_of(call: Any) -> None:
    cards = call("GET", "/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        *(("tiny", None), ("also", None)),
        *(("plain", "tiny"), ("stable", "tiny")),
    ]
    assert call("GET", "/v1/models/stable").json()["parent"] == "tiny"


@pytest.mark.feature("S10")
def test_adapters_that_cannot_be_served_are_refused_before_anything_starts(
    adapted: Adapted, tmp_path: Path
) -> None:
    path = adapted.config.pools[0].engine.lora_modules[0].path
    cases: dict[Any, str] = {
        path: f"wanted each as name=directory, found '{path}'",
        f"a={path},a={path}": "wanted different names, found",
        f"lockstep-tiny={path}": "wanted names that are not the model's, found 'lockstep-tiny'",
        f"a={tmp_path}": "wanted adapters that Lockstep can serve, found 'adapter_config.json: wan",
    }
    for value, error in cases.items():
        with pytest.raises(FieldError) as raised:
            deploy_config({"device": "cpu", "lora_modules": value})
        assert str(raised.value).startswith(f"lora_modules: {error}")


def test_deployments_with_other_adapters_exchange_neither_tokens_nor_kv(
    adapted: Adapted,
) -> None:
    plain, stable = adapted.config.pools[0].engine.lora_modules
    texts = [f"{each.name}={each.path}" for each in (plain, stable)]

    def hashes(config: DeployConfig) -> tuple[str, str]:
        return config.numerics_hash, config.pools[0].engine.kv_hash

    found = [
        hashes(deploy_config({"device": "cpu", "lora_modules": modules}))
        for modules in ("", texts[:1], texts[1:], texts, texts[::-1])
    ]
    for column in zip(*found, strict=True):
        assert len(set(column)) == 5
    renamed = deploy_config({"device": "cpu", "lora_modules": f"other={plain.path}"})
    assert hashes(renamed) == found[1]
