"""`LLM(...).generate`: the engine in this process, without Ray; one of several ranks as Ray actors.

    from serve.llm import LLM, SamplingParams

    llm = LLM("path/to/checkpoint", max_num_seqs=8)
    for output in llm.generate(["one prompt", "another"], SamplingParams(temperature=0)):
        print(output.outputs[0].text)

Arguments are those of `deploy`, checked in the same way; the engine's step is the same too. With
`tensor_parallel_size=2` or `data_parallel_size=2` there are two ranks, each an actor of the cluster
that this process belongs to, as a Ray job does, or else of one that is started on this machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

from cluster.group.context import RankContext
from cluster.rank.leader import assemble_engine
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import EngineOutput, GenerateRequest, Submit, TokenLogprobs
from compile.config import CompilationConfig
from model.config import ModelConfig
from model.fields import Source, convert
from serve.clients import UNKNOWN, CacheSalt, CacheSalts
from serve.config import offline_pool
from serve.requests.choice import Choice, GenerationError, StopStrings
from serve.requests.sampling import Resolver, SamplingParams
from serve.requests.structured import StructuredOutputsParams, Verdicts
from serve.requests.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "GenerationError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


class TextPrompt(TypedDict):
    """A prompt with what goes with it, as vLLM has it."""

    prompt: str
    cache_salt: NotRequired[str]
    """Find in the prefix cache only what prompts with the same salt have left there."""


class TokensPrompt(TypedDict):
    """The same as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One per choice."""
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Empty, or one per prompt token; None for the first, which follows nothing."""


class OfflineEngine(Protocol):
    """The engine of one rank, or a group of several (`JobGroup`), which one thread uses. `step`
    returns what has come since."""

    @property
    def has_unfinished(self) -> bool: ...
    def submit(self, submit: Submit) -> None: ...
    def step(self) -> list[EngineOutput]: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...


class LLM:
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        compilation_config: CompilationConfig | dict[str, Any] | str | int | None = None,
        tensor_parallel_size: int | None = None,
        data_parallel_size: int | None = None,
        **options: Any,
    ) -> None:
        """Load a checkpoint; None is the bundled one. FieldError for what cannot be used.
        `compilation_config` is a configuration, its fields (also as JSON), or a level; the sizes
        are those of `mixed.*`; `options` are arguments of `deploy` that concern one rank group."""
        if model is not None:
            options["model"] = str(model)
        if tensor_parallel_size is not None:
            options["mixed.tensor_parallel_size"] = tensor_parallel_size
        if data_parallel_size is not None:
            options["mixed.data_parallel_size"] = data_parallel_size
        if compilation_config is not None:
            options["compilation"] = compilation_config
        pool = offline_pool(options)
        self.config = pool.engine
        path = Path(self.config.model_path)
        self.tokenizer = Tokenizer.from_dir(path)
        self._vocab_size = ModelConfig.from_dir(path).vocab_size
        self.engine: OfflineEngine
        if self.config.parallel.world_size > 1:
            from cluster.grammar.compile import vocabulary_of
            from serve.pools.job_group import JobGroup  # which imports Ray

            group = JobGroup(pool)
            weakref.finalize(self, group.close).atexit = False  # it ends by itself then
            self.engine, vocabulary = group, vocabulary_of(path, self._vocab_size)
        else:
            self.runner = ModelRunner(RankContext(self.config))
            self.engine = assemble_engine(self.config, self.runner)
            assert self.runner.grammars is not None, "the only rank samples"
            vocabulary = self.runner.grammars.vocabulary
        self._grammar_text = partial(Verdicts().find, vocabulary)
        self._salts = CacheSalts()
        self._adapters = [module.name for module in self.config.lora_modules]
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs are in their order. `lora_request` is the name
        of an adapter of `lora_modules`, for all prompts or for each; None is the model without.
        GenerationError if a prompt cannot be served; ValueError if there are several sampling
        parameters or adapters, but not one for each prompt, a prompt has fields that it may not
        have, or there is no such adapter."""
        given: Any = prompts
        is_one = isinstance(given, str | dict) or (given and isinstance(given[0], int))
        many: list[Prompt] = [given] if is_one else list(given)
        params = SamplingParams() if sampling_params is None else sampling_params
        if isinstance(params, SamplingParams):
            params = [params] * len(many)
        if len(params) != len(many):
            wanted, found = len(many), len(params)
            raise ValueError(f"sampling_params: wanted {wanted}, one per prompt, found {found}")
        is_for_all = lora_request is None or isinstance(lora_request, str)
        adapters: Any = [lora_request] * len(many) if is_for_all else lora_request
        if len(adapters) != len(many):
            wanted, found = len(many), len(adapters)
            raise ValueError(f"lora_request: wanted {wanted}, one per prompt, found {found}")
        # All are checked before the first is submitted, so that an error leaves nothing behind.
        prepared = [self._prepare(*each) for each in zip(many, params, adapters, strict=True)]
        running = {each.request.request_id: each for _, choices in prepared for each in choices}
        try:
            for choice in list(running.values()):
                self.engine.submit(Submit(choice.request, None))
            self._run(running)
        finally:
            self.engine.abort(running)
        return [_with_choices(output, choices) for output, choices in prepared]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: str | Sequence[str | None] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Generate answers to one conversation or many, through the checkpoint's chat template."""
        conversations: list[Any] = messages
        if conversations and isinstance(conversations[0], dict):
            conversations = [messages]
        prompts = [
            self.tokenizer.apply_chat_template(each, **template_kwargs) for each in conversations
        ]
        return self.generate(prompts, sampling_params, lora_request=lora_request)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, adapter: str | None = None
    ) -> tuple[RequestOutput, list[Choice]]:
        if adapter is not None and adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none (lora_modules has none)"
            raise ValueError(f"lora_request: wanted {known}, found {adapter}")
        adapter_id = 0 if adapter is None else self._adapters.index(adapter) + 1
        content, salt = _content(prompt)
        cache_salt = self._salts.of(UNKNOWN, salt)
        if isinstance(content, str):
            text, ids = content, self.tokenizer.encode(content, add_special_tokens=True)
        else:
            text, ids = None, list(content)
        resolver = Resolver(
            params,
            max_model_len=self.config.max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            grammar_text=self._grammar_text,
        )
        output = RequestOutput(f"offline-{next(self._ids)}", text, ids, [])
        if params.prompt_logprobs is not None:
            output.prompt_logprobs.append(None)
        stop = StopStrings(params.stop_strings)
        choices = [
            Choice(
                index,
                GenerateRequest(
                    f"{output.request_id}-{index}", ids, [], sampling, cache_salt, adapter_id
                ),
                self.tokenizer,
                params,
                stop,
            )
            for index, sampling in enumerate(resolver.choices(len(ids)))
        ]
        return output, choices

    def _run(self, running: dict[str, Choice]) -> None:
        # An overlapped engine is busy with what has ended until its last step has.
        while running or self.engine.has_unfinished:
            for output in self.engine.step():
                choice = running.get(output.request_id)
                if choice is None:
                    continue
                if output.finish_reason in ("error", "abort"):
                    raise GenerationError(output.error or "the request was aborted")
                choice.absorb(output)
                if choice.is_finished:
                    del running[output.request_id]
                    if not output.finish_reason:
                        self.engine.abort([output.request_id])


def _with_choices(output: RequestOutput, choices: list[Choice]) -> RequestOutput:
    """Fill in what was generated; what concerns the prompt comes with its first choice."""
    output.num_cached_tokens = choices[0].num_cached_tokens or 0
    output.prompt_logprobs += choices[0].prompt_logprobs
    for choice in choices:
        found = choice.take()
        told = found.text, found.token_ids, found.logprobs, choice.finish_reason, found.stop_reason
        output.outputs.append(CompletionOutput(choice.index, *told))
    return output


def _content(prompt: Prompt) -> tuple[str | Sequence[int], str | None]:
    """Return a prompt's text or token ids, and its salt; ValueError if it has other fields."""
    if not isinstance(prompt, dict):
        return prompt, None
    fields: dict[str, Any] = {**prompt}
    salt = fields.pop("cache_salt", None)
    if salt is not None:
        convert(salt, CacheSalt, Source.PYTHON, "cache_salt")
    if fields.keys() not in ({"prompt"}, {"prompt_token_ids"}):
        wanted = "prompt or prompt_token_ids, and cache_salt"
        raise ValueError(f"prompts: wanted {wanted}, found {', '.join(prompt)}")
    [content] = fields.values()
    return content, salt
