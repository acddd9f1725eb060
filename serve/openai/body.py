"""A request's body: read within its limits, and checked before any work grows with it.

When a request is refused, the rest of its body is read for a while and dropped: a client whose
connection is closed while it sends sees a reset instead of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from starlette.requests import Request

from compile.errors import FieldError, Words
from serve.admission import AdmissionSlot
from serve.openai.backend import ApiSettings
from serve.openai.errors import ApiError
from serve.openai.schema import ChatRequest, CompletionRequest
from serve.requests.tokenizer import Tokenizer

MAX_DISCARDED_BYTES = 64 << 20
"""What is read and dropped of a refused body, so that its client can read why."""
MAX_DISCARD_S = 10.0
"""How long a refused body is read."""
MAX_DISCARD_PAUSE_S = 0.5
"""A client that sends nothing for so long is taken to wait for the answer."""
MAX_DISCARDS = 64
"""Refused bodies that are read at once; further connections are just closed."""

SMALL_BYTES = 64 * 1024
"""A body of this size is not counted: parsing it takes milliseconds, whatever it holds."""
MAX_VALUES = 200_000
"""Strings, lists and objects of one body; more get 400. Each costs the interpreter some 200 ns and
100 bytes, in one go that nothing interrupts."""
MAX_NUMBERS = 400_000
"""Numbers of one body, or twice `max_model_len` if that is more, since a prompt may be token ids;
more get 400. Each costs a fifth of a string."""
MAX_DIGITS = 400
"""Digits in a row; more get 400. The cost of a long integer grows with the square of its length.
Floats have 309 at most."""
_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")


class BodyReader:
    """Reads the bodies of one app's requests."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._num_discarding = 0

    def check_length(self, request: Request) -> None:
        """Refuse a body by the length that the request announces; raises ApiError."""
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._settings.args.max_body_bytes:
            raise self._too_large(length[:20])

    async def read(self, request: Request, slot: AdmissionSlot) -> bytes:
        """Return the request's body, whose bytes count as held by `slot`.

        Raises:
            ApiError: too many bytes have come (413); or it did not come within the request's time,
                or came slowly while another request wanted its slot (408).
            Overloaded: other requests hold too many bytes.
        """
        limit = self._settings.args.max_body_bytes
        body = bytearray()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.args.request_timeout_s) as timer:
                slot.on_evicted = lambda: timer.reschedule(loop.time())
                async for part in request.stream():
                    if len(body) + len(part) > limit:
                        raise self._too_large(f"at least {len(body) + len(part)}")
                    slot.hold(len(part))
                    body += part
        except TimeoutError as error:
            wanted = f"wanted within {self._settings.args.request_timeout_s:g} s, sooner under load"
            raise ApiError(408, f"body: {wanted}, found it unfinished") from error
        finally:
            slot.on_evicted = None
        return bytes(body)

    async def discard(self, request: Request) -> None:
        """Read on for a while and keep nothing: the answer is a refusal."""
        if self._num_discarding >= MAX_DISCARDS:
            return
        self._num_discarding += 1
        try:
            await _discard(request.stream())
        finally:
            self._num_discarding -= 1

    def _too_large(self, found: str) -> ApiError:
        # The unread rest is still in the connection, which cannot serve another request.
        wanted = f"wanted at most {self._settings.args.max_body_bytes} bytes"
        return ApiError(413, f"body: {wanted}, found {found}", headers={"Connection": "close"})


async def _discard(parts: AsyncGenerator[bytes, None]) -> None:
    num_bytes = 0
    with suppress(TimeoutError, RuntimeError):  # that the body was read already
        async with asyncio.timeout(MAX_DISCARD_S):
            while num_bytes < MAX_DISCARDED_BYTES:
                async with asyncio.timeout(MAX_DISCARD_PAUSE_S):
                    part = await anext(parts, None)
                if part is None:
                    return
                num_bytes += len(part)


def check_values(body: bytes, max_model_len: int) -> None:
    """Refuse JSON of very many or very long values before they are built; a few ms for each MB.

    Raises:
        ApiError: says how many there may be.
    """
    if len(body) <= SMALL_BYTES:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = plain.count(b'"') // 2
    _check("strings", num_strings, MAX_VALUES)
    structure = b"".join(plain.split(b'"')[::2])
    _check("lists and objects", structure.count(b"[") + structure.count(b"{"), MAX_VALUES)
    max_numbers = max(MAX_NUMBERS, 2 * max_model_len)
    _check("numbers", structure.count(b",") - num_strings, max_numbers)
    if b"0" * (MAX_DIGITS + 1) in structure.translate(_DIGITS_ALIKE):
        message = f"body: wanted numbers of at most {MAX_DIGITS} digits, found a longer one"
        raise ApiError(400, message)


def _check(what: str, found: int, limit: int) -> None:
    if found > limit:
        raise ApiError(400, f"body: wanted at most {limit} {what}, found {found}")


def check_limits(
    request: ChatRequest | CompletionRequest,
    settings: ApiSettings,
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
) -> None:
    """Refuse too many sequences, and lists that are longer than the vocabulary.

    Raises:
        FieldError: names the limit and what was found.
    """
    limit = settings.max_sequences
    if num_prompts > limit:
        raise FieldError("prompt", f"at most {limit} prompts", num_prompts)
    if num_prompts * max(request.n, 1) > limit:
        wanted = f"at most {limit // num_prompts}"
        if num_prompts > 1:
            wanted += f" (the request has {num_prompts} prompts)"
        raise FieldError("n", wanted, request.n)
    num_allowed = len(request.allowed_token_ids or ())
    if num_allowed > tokenizer.vocab_size:
        wanted = f"at most {tokenizer.vocab_size} token ids, the vocabulary's"
        raise FieldError("allowed_token_ids", wanted, num_allowed)


def check_num_chars(
    field: str, num_chars: int, settings: ApiSettings, tokenizer: Tokenizer
) -> None:
    """Refuse a prompt of more characters than its tokens could stand for.

    Raises:
        FieldError: names the limit and how it is derived.
    """
    longest = tokenizer.longest_token
    limit = settings.max_model_len * longest
    if num_chars > limit:
        wanted = (
            f"at most {limit} characters (the model's length is {settings.max_model_len} tokens, "
            f"the longest of which stands for {longest})"
        )
        raise FieldError(field, wanted, Words(f"{num_chars} characters"))
