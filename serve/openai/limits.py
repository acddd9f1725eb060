"""Limits of one request, checked when it is parsed and before any work grows with it."""

from __future__ import annotations

from serve.openai.errors import BadRequest
from serve.openai.schema import ChatRequest, CompletionRequest
from serve.openai.settings import ApiSettings
from serve.tokenizer import Tokenizer


def check_limits(
    request: ChatRequest | CompletionRequest,
    settings: ApiSettings,
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
) -> None:
    """Refuse too many sequences, and lists that are longer than the vocabulary.

    Raises:
        BadRequest: names the field, the limit and what was found.
    """
    limit = settings.max_sequences
    if num_prompts > limit:
        raise _refused("prompt", f"at most {limit} prompts", num_prompts)
    if num_prompts * max(request.n, 1) > limit:
        wanted = f"at most {limit // num_prompts}"
        if num_prompts > 1:
            wanted += f" (the request has {num_prompts} prompts)"
        raise _refused("n", wanted, request.n)
    num_allowed = len(request.allowed_token_ids or ())
    if num_allowed > tokenizer.vocab_size:
        wanted = f"at most {tokenizer.vocab_size} token ids, the vocabulary's"
        raise _refused("allowed_token_ids", wanted, num_allowed)


def check_num_chars(
    field: str, num_chars: int, settings: ApiSettings, tokenizer: Tokenizer
) -> None:
    """Refuse a prompt of more characters than its tokens could stand for.

    Raises:
        BadRequest: names the limit and how it is derived.
    """
    longest = tokenizer.longest_token
    limit = settings.max_model_len * longest
    if num_chars > limit:
        wanted = (
            f"at most {limit} characters (the model's length is {settings.max_model_len} tokens, "
            f"the longest of which stands for {longest})"
        )
        raise _refused(field, wanted, f"{num_chars} characters")


def _refused(field: str, wanted: str, found: object) -> BadRequest:
    return BadRequest(f"{field}: wanted {wanted}, found {found}", param=field)
