"""How large an answer may become by what its request asks for, in bytes of JSON.

A few hundred bytes can ask for hundreds of megabytes: log-probabilities of a long prompt, repeated
for 128 choices. What a client has not read stays in memory, here or in the proxy in front, so an
answer is bounded before it is begun.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from serve.openai.schema import ChatRequest, CompletionRequest
from serve.sampling import DEFAULT_MAX_TOKENS, ParameterError, SamplingParams

TEXT_BYTES = 8
"""Bytes of a token's text: about twice the mean."""
TOKEN_ID_BYTES = 7
CANDIDATE_BYTES = 80
"""Bytes of one candidate among log-probabilities: its text, its bytes as numbers, its value."""
EVENT_BYTES = 320
"""Bytes of a stream's event beside the text: each repeats the answer's id, model and date."""
COPIES_IN_MEMORY = 4
"""Copies of a whole answer: what the engine sent, structs, JSON, and what the server holds."""


class AnswerSize(msgspec.Struct, frozen=True):
    """The approximate size of one request's answer."""

    prompt_bytes: int
    """What is said of the prompts, however much is generated."""
    token_bytes: int
    """Of one token of one choice."""
    num_choices: int

    @classmethod
    def of(
        cls,
        request: ChatRequest | CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        *,
        num_prompt_copies: int,
    ) -> AnswerSize:
        """Return the size of the answer to these prompts.

        Args:
            num_prompt_copies: how often an answer repeats what it says of a prompt.
        """
        of_prompt_token = _candidates(params.prompt_logprobs)
        of_token = TEXT_BYTES + _candidates(params.logprobs)
        if request.stream:
            of_token += EVENT_BYTES
        if request.return_token_ids:
            of_prompt_token += TOKEN_ID_BYTES
            of_token += TOKEN_ID_BYTES
        num_prompt_tokens = sum(map(len, prompts))
        return cls(
            prompt_bytes=num_prompt_tokens * num_prompt_copies * of_prompt_token,
            token_bytes=of_token,
            num_choices=len(prompts) * params.n,
        )

    def of_tokens(self, num_tokens: int) -> int:
        """Return the bytes of an answer with so many tokens in all choices."""
        return self.prompt_bytes + num_tokens * self.token_bytes

    def max_tokens(self, params: SamplingParams, max_bytes: int) -> int:
        """Return how many tokens a choice may have in an answer of `max_bytes`.

        Raises:
            ParameterError: they are fewer than the request asks for.
        """
        limit = f"an answer has at most max_answer_bytes, here {max_bytes} bytes"
        if self.prompt_bytes > max_bytes:
            by_logprobs = params.prompt_logprobs is not None
            param = "prompt_logprobs" if by_logprobs else "return_token_ids"
            found = f"{self.prompt_bytes} for {params.n} choices"
            raise ParameterError(param, f"less said of the prompt ({limit})", found)
        left = (max_bytes - self.prompt_bytes) // (self.num_choices * self.token_bytes)
        asked = DEFAULT_MAX_TOKENS if params.max_tokens is UNSET else params.max_tokens
        asked = max(asked or 1, params.min_tokens)
        if asked > left:
            each = f"{self.token_bytes} for each token of {self.num_choices} choices"
            raise ParameterError("max_tokens", f"at most {left} ({limit}, {each})", asked)
        return left


def _candidates(num_logprobs: int | None) -> int:
    return 0 if num_logprobs is None else (1 + num_logprobs) * CANDIDATE_BYTES
