"""Every structure that travels between processes, and the way on and off the wire.

Only what a leader and its tensor-parallel followers say to each other has a file of its own,
`channel_messages.py`.

The one thing to know: all of them are array-like msgspec structs that forbid unknown fields and
have no defaults, so a frame that is too short, too long or of another type is refused instead of
being filled in. `encode` and `decode` are the only way on and off the wire.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Hashable
from typing import Any, TypeVar, cast

import msgspec

PROTOCOL_VERSION = 3


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all wire structs: positional, immutable, strict."""


class FrameError(ValueError):
    """A frame from another process is not what this one understands."""


# --- requests -------------------------------------------------------------------------------


class LogitRules(Wire, frozen=True):
    """What changes a sequence's logits before temperature.

    Invariant: repetition_penalty > 0; token ids lie in the vocabulary; `bias_token_ids` and
    `biases` have equal length.
    """

    presence_penalty: float
    """Subtracted from tokens that the output has; 0 is off."""
    frequency_penalty: float
    """Subtracted for each time that the output has a token; 0 is off."""
    repetition_penalty: float
    """Divides positive logits of tokens in prompt or output, multiplies others; 1 is off."""
    bias_token_ids: tuple[int, ...]
    biases: tuple[float, ...]
    """Added to these tokens' logits."""
    allowed_token_ids: tuple[int, ...]
    """No other token is drawn; empty allows all."""
    min_tokens: int
    """Output tokens before a stop token may be drawn."""

    @property
    def has_penalties(self) -> bool:
        """Whether the sequence's own tokens matter, all of them."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


class Sampling(Wire, frozen=True):
    """How one sequence's tokens are drawn and when it ends; fully resolved by the front end.

    Invariant: 0 <= temperature, 0 < top_p <= 1, 0 <= min_p <= 1, top_k >= 0, max_tokens >= 1.
    """

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 keeps all."""
    top_p: float
    """1 keeps all."""
    min_p: float
    """Least probability relative to the likeliest token's; 0 keeps all."""
    seed: int
    """64 unsigned bits; with the output position it decides each draw."""
    max_tokens: int
    """Output tokens in all, those of `output_token_ids` included."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end the sequence, the model's end tokens included unless ignored."""
    num_logprobs: int
    """-1: none; 0: of the drawn token; n: of the n likeliest as well."""
    num_prompt_logprobs: int
    """The same for each prompt token but the first."""
    rules: LogitRules | None
    """None where logits stay as they are."""


class GenerateRequest(Wire, frozen=True):
    """One sequence to generate.

    `output_token_ids` were delivered earlier, by another engine: they are computed again like a
    prompt, but count as output for limits, draws and usage.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: Sampling
    reply_to: str
    """Address of the socket that wants the tokens."""


class KVSource(Wire, frozen=True):
    """Where one rank's KV blocks can be read, by shared memory or TCP."""

    tp_rank: int
    boot_id: str
    """Identifies the node and its boot: shared memory is usable where both sides agree."""
    pid: int
    shm_fd: int
    """File descriptor of the pool in process `pid`; -1 where the pool is private."""
    address: str
    """ZeroMQ endpoint that serves reads, renewals and releases."""


class KVHandoff(Wire, frozen=True):
    """A ticket for the KV blocks that a prefill rank holds for one sequence.

    Invariant: `block_ids` and `generations` have equal length and cover `num_tokens` tokens; a
    block whose generation differs at the source has been reused and must not be believed.
    """

    ticket: int
    request_id: str
    sources: list[KVSource]
    block_ids: list[int]
    generations: list[int]
    num_tokens: int
    block_bytes: int
    layout: str
    """Identifies dtype and shape of a block; both sides must agree."""
    lease_s: float


class Submit(Wire, frozen=True, tag=True):
    """Ask an engine to generate; with a handoff, to take over a prefilled sequence."""

    request: GenerateRequest
    handoff: KVHandoff | None


class Abort(Wire, frozen=True, tag=True):
    """Drop these requests wherever they are. Unknown ids are remembered for a while."""

    request_ids: list[str]


class Watch(Wire, frozen=True, tag=True):
    """Tell `address` the ids of requests that ended, one frame per step."""

    address: str


Inbound = Submit | Abort | Watch


# --- outputs --------------------------------------------------------------------------------


class TokenLogprobs(Wire, frozen=True):
    """Log-probabilities at one output position, of the raw distribution."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_token_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(Wire, frozen=True):
    """What one step produced for one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """Empty, or one entry per token."""
    finish_reason: str
    """Empty while it runs; else stop, length, abort, handoff, kv_lost or error."""
    stop_token_id: int
    """The token that ended it; -1 where none did."""
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""
    handoff: KVHandoff | None
    error: str
    prompt_logprobs: list[TokenLogprobs]
    """Beside a request's first output token, if asked for: of each prompt token but the first."""


class OutputFrame(Wire, frozen=True, tag=True):
    """All outputs of one step for one ingress."""

    epoch: int
    engine_id: str
    inbox: str
    """Where the engine takes requests and aborts."""
    outputs: list[EngineOutput]


class EndedFrame(Wire, frozen=True, tag=True):
    """The requests that ended in one step, for the replica that submitted them."""

    epoch: int
    ended: list[EngineOutput]


FromEngine = OutputFrame | EndedFrame


# --- the step -------------------------------------------------------------------------------


class RowRules(Wire, frozen=True):
    """Logit rules with what a row must know of its sequence to follow them.

    With penalties a row counts each token that its plans compute. `computed_token_ids` are those
    that no plan will bring, since their KV was found, read or handed over.
    """

    rules: LogitRules
    stop_token_ids: tuple[int, ...]
    """Empty without min_tokens."""
    num_prompt_tokens: int
    computed_token_ids: list[int]
    """The sequence's head; empty without penalties."""


class Admission(Wire, frozen=True):
    """A sequence enters a row of the batch; the row keeps these until the next admission."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_logprobs: int
    rules: RowRules | None


class NewBlocks(Wire, frozen=True):
    """Blocks appended to a row's block table from column `start` on."""

    row: int
    start: int
    block_ids: list[int]


class PromptTargets(Wire, frozen=True):
    """The prompt tokens whose log-probabilities a step computes for one sequence.

    Token i is scored by the sequence's i-th token in the step, the one before it. There is one
    token less than the step computes where the prompt ends: the last one scores the output.
    """

    index: int
    """The sequence's place in the plan."""
    token_ids: list[int]
    num_logprobs: int


class Vote(Wire, frozen=True, tag=True):
    """What one data-parallel rank wants to do in a step. No field has a default."""

    epoch: int
    step: int
    kind: int
    """0: nothing, 1: pure decode, 2: mixed or prefill."""
    num_tokens: int
    num_seqs: int
    max_query_len: int
    graph_allowed: bool
    has_work: bool
    draining: bool
    """The rank was told to end, and does as soon as all were."""


class StepAgreement(Wire, frozen=True):
    """What all ranks agreed to do in a step: every field is identical on every rank.

    Without work the group sleeps until somebody votes for step + 1.
    """

    epoch: int
    step: int
    kind: int
    max_tokens: int
    max_seqs: int
    max_query_len: int
    graph_allowed: bool
    """On all ranks."""
    has_work: bool
    """On any rank, unless the group ends."""
    draining: bool
    """All ranks were told to end: this step is not run and no other follows."""
    num_tokens_across_dp: tuple[int, ...]
    """Of each data-parallel rank, without padding."""


class StepPlan(Wire, frozen=True):
    """One step's batch: everything that a rank needs beside its own rows' state.

    S sequences, T tokens. Sequences with a single new token come first (`num_decodes` of them).

    Invariant: rows, num_computed, num_new, output_index have length S; token_ids has length T =
    sum(num_new). output_index[i] is the output position that sequence i samples in this step, or
    -1 where its prompt is not finished.
    """

    epoch: int
    step: int
    admitted: list[Admission]
    new_blocks: list[NewBlocks]
    rows: list[int]
    num_computed: list[int]
    num_new: list[int]
    output_index: list[int]
    token_ids: list[int]
    num_decodes: int
    prompt_targets: list[PromptTargets]
    """Of the sequences that want log-probabilities of their prompt."""

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def vote(self, *, draining: bool = False) -> Vote:
        """Return this rank's vote for the step."""
        is_decode = self.num_decodes == len(self.rows)
        kind = (1 if is_decode else 2) if self.rows else 0
        return Vote(
            epoch=self.epoch,
            step=self.step,
            kind=kind,
            num_tokens=len(self.token_ids),
            num_seqs=len(self.rows),
            max_query_len=max(self.num_new, default=0),
            graph_allowed=True,
            has_work=bool(self.rows),
            draining=draining,
        )


class SampledTokens(Wire, frozen=True):
    """The tokens that a step drew, one per sequence with an output index, in batch order.

    `logprobs` is empty, or aligned with `token_ids` (None where not asked for);
    `prompt_logprobs` is aligned with the plan's `prompt_targets`.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]


# --- KV transfer ----------------------------------------------------------------------------


class KVRead(Wire, frozen=True, tag=True):
    """Send the bytes of these blocks (TCP transport)."""

    ticket: int
    block_ids: list[int]
    generations: list[int]


class KVRenew(Wire, frozen=True, tag=True):
    """Extend the ticket's lease."""

    ticket: int


class KVRelease(Wire, frozen=True, tag=True):
    """The reader is done with the ticket; `num_blocks_read` of its blocks were copied."""

    ticket: int
    num_blocks_read: int


KVCall = KVRead | KVRenew | KVRelease


class KVAnswer(Wire, frozen=True):
    """`alive` tells whether the lease held from the handoff until now."""

    ticket: int
    call: str
    """The type of the call that is answered: answers to a renewal and to a release differ."""
    alive: bool


# --- on and off the wire ----------------------------------------------------------------------


class Header(Wire, frozen=True):
    """Opens every frame between processes of one deployment."""

    protocol: int
    config_hash: str


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode

T = TypeVar("T")


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode(data: bytes | memoryview, kind: type[T] | Any) -> Any:
    """Return the struct of type `kind` that `data` holds.

    Raises:
        FrameError: the bytes are not exactly one such struct; names the field.
    """
    try:
        return _decoder(cast("Hashable", kind)).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise FrameError(
            f"frame: wanted {name}, found {len(data)} bytes that do not fit: {error}"
        ) from error


def checksum(content: object, start: int = 0) -> int:
    """Return 32 bits that follow from the encoded content, and from an earlier checksum."""
    return zlib.crc32(encode(content), start)


def header_bytes(config_hash: str) -> bytes:
    """Return the header frame that processes of one deployment send and expect."""
    return encode(Header(PROTOCOL_VERSION, config_hash))


def check_header(found: bytes, wanted: bytes) -> None:
    """Compare a received header with our own.

    Raises:
        FrameError: names protocol version or configuration hash, with both values.
    """
    if found == wanted:
        return
    theirs: Header = decode(found, Header)
    ours: Header = decode(wanted, Header)
    if theirs.protocol != ours.protocol:
        raise FrameError(f"protocol: wanted version {ours.protocol}, found {theirs.protocol}")
    raise FrameError(f"config_hash: wanted {ours.config_hash}, found {theirs.config_hash}")
