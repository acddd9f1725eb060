"""Structures that travel between processes, and the way on and off the wire.

All of them are array-like msgspec structs. Those within a group forbid unknown fields and have no
defaults, so a frame that is too short, too long or of another type is refused instead of being
filled in. Those between deployments may grow (`GrowingWire`). A request with a value that no model
and no configuration could take is refused: bounds are in the fields' types. What depends on the
engine is checked by its `RequestLimits`.
"""

from __future__ import annotations

import enum
import functools
import zlib
from collections.abc import Hashable, Iterator
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from cluster.config import MAX_LEASE_S, MIN_LEASE_S
from compile.config import CUDAGraphMode
from compile.dispatch import BatchDescriptor

PROTOCOL_VERSION = 14

# Bounds of sampling, for requests of clients as well as on the wire.
MAX_TEMPERATURE = 1e6
"""Far above what draws uniformly, and far below what float32 takes for infinity."""
MAX_PENALTY = 2
"""OpenAI's bound on presence and frequency penalty, either way."""
MAX_REPETITION = 1e3
"""Bound on `repetition_penalty`, and the inverse of its lower one: logits times or divided by it
are still finite."""
MAX_BIAS = 100
"""OpenAI's bound on one bias; it decides for or against a token."""
MAX_BIASES = 1024
"""Tokens in `logit_bias`, about three times what OpenAI takes; each is sent to every rank."""
MAX_STOP_IDS = 512
"""256 of a request's own, and the model's end tokens."""
MAX_LOGPROBS = 20
"""Candidates for each token: OpenAI's and vLLM's default. More are more bytes than the text."""
MAX_GRAMMAR_CHARS = 1 << 18
"""Of a grammar as engines take it: four times what a request may bring, since JSON in JSON has
escapes."""
MAX_ABORTS = 1024
"""In one frame: each of them is looked for in the queue."""
SALT_BYTES = 16
FIRST_LOADED_ID = 1 << 16
"""Of adapters that are loaded while the application serves."""
MAX_PID = 1 << 22
"""Linux has no higher process ids."""
MAX_FD = 1 << 20
"""Linux gives a process no higher file descriptor unless `fs.nr_open` is raised."""

Count = Annotated[int, Meta(ge=0, le=2**53)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Of a token in its vocabulary, or of a block in its pool."""
Name = Annotated[str, Meta(max_length=256)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    (
        f"({_HEX}:){{7}}{_HEX}",
        *(f"({_HEX}:){{1,{7 - n}}}(:{_HEX}){{1,{n}}}" for n in range(1, 7)),
        f"({_HEX}:){{1,7}}:",
        f":(:{_HEX}){{1,7}}",
        "::",
    )
)
Address = Annotated[str, Meta(pattern=rf"^(tcp://({_IPV4}|\[({_IPV6})\]):[0-9]{{1,5}})?\Z")]
"""A ZeroMQ endpoint by number, or nowhere. A host's name would be looked up on the thread that
carries all sockets of the process."""
NumLogprobs = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]
Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Meta(gt=0, le=1)]
"""Ranks hold it as float32, and raise what is smaller to that type's smallest normal number."""
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Repetition = Annotated[float, Meta(ge=1 / MAX_REPETITION, le=MAX_REPETITION)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all wire structs: positional, immutable, strict."""


class GrowingWire(Wire, frozen=True, forbid_unknown_fields=False):
    """Base of what ingresses and leaders, holders of KV and its readers exchange. While one
    deployment replaces another, those of protocol version N and N - 1 read each other. So a change
    that counts `PROTOCOL_VERSION` up by one is one of these:

    - A new field comes last, with a default that means what was before. Whoever does not know it
      yet skips it. One that changes tokens counts up `NUMERICS_VERSION` (`serve/config.py`) too, so
      that no engine that would skip it gets the request.
    - A new kind of frame, or member of an enum, goes only to those whose reported version has it.

    `RankProcess` never changes: readers encode it again to be compared. Any other change counts up
    by two, and then nothing is exchanged.
    """


class FrameError(ValueError):
    """A frame from another process is not what this one understands."""


# --- requests -------------------------------------------------------------------------------


class LogitRules(GrowingWire, frozen=True):
    """What changes a sequence's logits before temperature. Invariant: token ids lie in the
    vocabulary; `bias_token_ids` and `biases` have equal length; what is allowed leaves a token to
    draw, also before `min_tokens`."""

    presence_penalty: Penalty
    """Subtracted from tokens that the output has; 0 is off."""
    frequency_penalty: Penalty
    """Subtracted for each time that the output has a token; 0 is off."""
    repetition_penalty: Repetition
    """Divides positive logits of tokens in prompt or output, multiplies others; 1 is off."""
    bias_token_ids: Annotated[tuple[Index, ...], Meta(max_length=MAX_BIASES)]
    biases: Annotated[tuple[Bias, ...], Meta(max_length=MAX_BIASES)]
    allowed_tokens: Annotated[bytes, Meta(max_length=1 << 21)]
    """Bit i % 8 of byte i // 8, the lowest first, allows token i; no other token is drawn. Bits
    behind the last byte are 0. Empty allows all."""
    min_tokens: Index
    """Output tokens before a stop token may be drawn."""

    @property
    def has_penalties(self) -> bool:
        """Whether the sequence's own tokens matter, all of them."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


class Grammar(GrowingWire, frozen=True):
    """What a sequence's text must be, compiled by each engine that draws its tokens. How far a
    sequence has got in it follows from its output tokens alone."""

    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
    end_token_ids: Annotated[tuple[Index, ...], Meta(max_length=MAX_STOP_IDS)]
    """Tokens that may be drawn where the text may end, and nowhere else."""


class Sampling(GrowingWire, frozen=True):
    """How one sequence's tokens are drawn and when it ends; fully resolved by the front end."""

    temperature: Temperature
    """0 is greedy."""
    top_k: Index
    """0 keeps all."""
    top_p: TopP
    """1 keeps all."""
    min_p: Probability
    """Least probability relative to the likeliest token's; 0 keeps all."""
    seed: Annotated[int, Meta(ge=0)]
    """64 unsigned bits; with the output position it decides each draw."""
    max_tokens: MaxTokens
    """Output tokens in all, those of `output_token_ids` included."""
    stop_token_ids: Annotated[tuple[Index, ...], Meta(max_length=MAX_STOP_IDS)]
    """Tokens that end the sequence, the model's end tokens included unless ignored."""
    num_logprobs: NumLogprobs
    """-1: none; 0: of the drawn token; n: of the n likeliest as well."""
    num_prompt_logprobs: NumLogprobs
    """The same for each prompt token but the first."""
    rules: LogitRules | None
    """None if logits stay as they are."""
    grammar: Grammar | None
    """None if any text will do."""


class GenerateRequest(GrowingWire, frozen=True):
    """One sequence to generate. `output_token_ids` were delivered earlier, by another engine: they
    are computed again like a prompt, but count as output for limits, draws and usage."""

    request_id: RequestId
    prompt_token_ids: list[Index]
    output_token_ids: list[Index]
    sampling: Sampling
    cache_salt: Annotated[bytes, Meta(max_length=SALT_BYTES)]
    """Of the prefix cache, which shows a sequence no KV of sequences with another one. A digest;
    empty: shared by all that have none."""
    adapter_id: Index = 0
    """The id of its adapter; 0: none."""


class LoraAdapter(Wire, frozen=True):
    """An adapter that was loaded while the application serves."""

    id: Annotated[int, Meta(ge=FIRST_LOADED_ID, le=2**31 - 1)]
    """No other adapter of the application has or had it, so nothing that was computed with one is
    ever taken for another's. Those of `lora_modules` have theirs by their places, from 1 on."""
    name: Name
    """What requests call the model with it."""
    path: str
    """A directory, on every node."""
    fingerprint: bytes
    """Of the files when it was loaded first: a rank refuses others."""


class RankProcess(GrowingWire, frozen=True):
    """One rank's process: no other is ever equal to it, whatever port it is given."""

    epoch: int
    nonce: Name


class KVSource(GrowingWire, frozen=True):
    """Where one rank's KV blocks can be read, by shared memory or TCP."""

    tp_rank: Index
    boot_id: Name
    """Identifies the node and its boot: shared memory is usable if both sides agree."""
    pid: Annotated[int, Meta(ge=0, le=MAX_PID)]
    shm_fd: Annotated[int, Meta(ge=-1, le=MAX_FD)]
    """File descriptor of the pool in process `pid`; -1 if the pool is private."""
    address: Address
    process: RankProcess
    """The handoff's holder: calls name it, so that no other that listens there serves them."""


class KVHandoff(GrowingWire, frozen=True):
    """The KV blocks that a prefill rank holds for one sequence, and a decode rank may read.
    Invariant: `block_ids` and `generations` have equal length and cover `num_tokens` tokens; a
    block whose generation differs at the source has been reused and must not be used."""

    handoff_id: Count
    request_id: RequestId
    sources: Annotated[list[KVSource], Meta(max_length=1024)]
    block_ids: list[Index]
    generations: list[Count]
    num_tokens: Count
    block_bytes: Count
    kv_hash: Name
    """Of the engine that holds them; those with an equal one may read them."""
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]


class Submit(GrowingWire, frozen=True, tag=True):
    """Ask an engine to generate; with a handoff, to take over a prefilled sequence."""

    request: GenerateRequest
    handoff: KVHandoff | None


class Abort(GrowingWire, frozen=True, tag=True):
    """Drop these requests wherever they are. Unknown ids are remembered for a while."""

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_ABORTS)]


class Leave(GrowingWire, frozen=True, tag=True):
    """Let these requests go on elsewhere. One that runs ends after its next token, with a handoff
    or `MOVED`, one that has computed nothing with `MOVED`; one that ends before is simply at its
    end."""

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_ABORTS)]
    with_kv: bool
    """Whether another engine can read their KV: it is held for that one."""


class Hello(GrowingWire, frozen=True, tag=True):
    """Opens a connection to the leader `engine_id` of this epoch, which answers with a frame
    without outputs; no other answers."""

    engine_id: Name
    epoch: Count


Inbound = Submit | Abort | Leave | Hello


class _BadRequest(GrowingWire, frozen=True):
    request_id: RequestId
    prompt_token_ids: msgspec.Raw
    output_token_ids: msgspec.Raw
    sampling: msgspec.Raw
    cache_salt: msgspec.Raw


class _BadSubmit(GrowingWire, frozen=True, tag="Submit"):
    """The part of a bad submission that names the request."""

    request: _BadRequest
    handoff: msgspec.Raw


def request_id_of(data: bytes) -> str:
    """Return the request id of a submission that `decode` refused; empty if it has none."""
    try:
        bad: _BadSubmit = _decoder(_BadSubmit).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return bad.request.request_id


# --- outputs --------------------------------------------------------------------------------


class TokenLogprobs(GrowingWire, frozen=True):
    """Log-probabilities at one output position, of the raw distribution."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_token_ids: list[int]
    top_logprobs: list[float]


class FinishReason(enum.StrEnum):
    """Why a request has ended, or a stage of it. Engines give all but `DIED`, which is the
    ingress's own."""

    NONE = ""
    STOP = "stop"
    """At one of its stop tokens."""
    LENGTH = "length"
    """It has as many tokens as it asked for, or as the model takes."""
    ABORT = "abort"
    HANDOFF = "handoff"
    """The prompt is computed, or the request leaves: another engine goes on with its KV."""
    MOVED = "moved"
    """It leaves without KV: another engine computes it."""
    ERROR = "error"
    KV_LOST = "kv_lost"
    """The prompt's KV could not be read, or an output is missing: it begins again elsewhere."""
    DIED = "died"
    """What ran it is gone: its leader's connection ended, or its replica was rebuilt or stopped."""


class EngineOutput(GrowingWire, frozen=True, kw_only=True):
    request_id: str
    position: int
    """Output tokens of the request before these: if an output got lost, the next one shows."""
    token_ids: list[Index]
    """None beside most ends, and where it is said that KV was read that another engine held."""
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason
    stop_token_id: int
    num_cached_tokens: int
    handoff: KVHandoff | None
    error: str
    prompt_logprobs: list[TokenLogprobs]
    """Beside a request's first output token, of each prompt token but the first. On the wire those
    of a long prompt stand in outputs of their own before it, in the same frame."""
    queued_us: Count
    """Beside an engine's first output token: microseconds until the request got a row. Else 0."""

    @classmethod
    def ended(
        cls,
        request_id: str,
        reason: FinishReason,
        error: str = "",
        *,
        position: int = 0,
        num_cached_tokens: int = 0,
    ) -> EngineOutput:
        """Return the last output of a request that ends without a token."""
        return cls(
            request_id=request_id,
            position=position,
            token_ids=[],
            logprobs=[],
            finish_reason=reason,
            stop_token_id=-1,
            num_cached_tokens=num_cached_tokens,
            handoff=None,
            error=error,
            prompt_logprobs=[],
            queued_us=0,
        )


class OutputFrame(GrowingWire, frozen=True, tag=True):
    """Outputs of one step for one ingress; long ones take several frames (`output_sender.py`).
    The first one on a connection has none."""

    outputs: list[bytes]
    """Each an encoded `EngineOutput`, so that the receiver may pause between two."""


GIVEN_UP = b""
"""In place of a frame where some are missing, since the ingress did not read: it connects anew."""


# --- the step -------------------------------------------------------------------------------


class RowRules(Wire, frozen=True):
    """Logit rules with what a row must know of its sequence to follow them. With penalties a row
    counts each token that its plans compute. `computed_token_ids` are those that no plan will
    bring, since their KV was found, read or handed over."""

    rules: LogitRules
    stop_token_ids: tuple[int, ...]
    """Empty without min_tokens."""
    num_prompt_tokens: int
    computed_token_ids: list[int]
    """The sequence's head; empty without penalties."""


class RowAdmission(Wire, frozen=True):
    """A sequence enters a row of the batch; the row keeps these until the next admission."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_logprobs: int
    rules: RowRules | None
    adapter_place: int
    """One more than the slot that its adapter has on the engine's ranks; 0: none."""


class NewBlocks(Wire, frozen=True):
    row: int
    start: int
    block_ids: list[int]


class PromptTargets(Wire, frozen=True):
    """The prompt tokens whose log-probabilities a step computes for one sequence. Token i is scored
    by the sequence's i-th token in the step, the one before it; at the prompt's end there is one
    less, since the last one scores the output."""

    index: int
    token_ids: list[int]
    num_logprobs: int


class StepKind(enum.IntEnum):
    """What a rank's sequences do in a step; the higher one prevails among ranks."""

    NOTHING = 0
    DECODE = 1
    """All decode: each its last token, and perhaps a draft of those behind it."""
    MIXED = 2
    """Some compute a prompt, or what was computed before they were pre-empted."""


class Vote(Wire, frozen=True, tag=True):
    """What one data-parallel rank wants to do in a step. No field has a default."""

    epoch: int
    step: int
    kind: StepKind
    num_tokens: int
    num_seqs: int
    max_query_len: int
    """Tokens of the sequence that computes most."""
    has_work: bool
    draining: bool
    """The rank was asked to end, and ends as soon as all were."""
    stage: int
    """How far it has gone over to compiled steps: equal on all ranks."""
    can_advance: bool
    """It could enter the next stage with this step."""


class StepAgreement(Wire, frozen=True):
    """How all ranks run a step: every field is identical on every rank.

    Whatever ranks must do alike is read here. Without work the group sleeps until a vote for step +
    1.
    """

    epoch: int
    step: int
    kind: StepKind
    mode: Annotated[int, Meta(ge=0, le=CUDAGraphMode.FULL.value)]
    """What is replayed, a `CUDAGraphMode`: 0 nothing, 1 piecewise graphs, 2 a full graph."""
    batch: BatchDescriptor
    """Sizes to pad to: `num_seqs` is `graph_bs`, `num_tokens` are those of the rank that runs most.
    In eager steps without a common size each rank runs its own, see `num_tokens_across_dp`."""
    num_tokens_across_dp: tuple[int, ...]
    """Tokens that each data-parallel rank runs, padding included."""
    num_scheduled_tokens: tuple[int, ...]
    """Of these, those that were asked for."""
    num_seqs_across_dp: tuple[int, ...]
    """Sequences that each of them scheduled."""
    has_work: bool
    """On any rank, or a stage to enter; unless the group ends."""
    draining: bool
    """All ranks were asked to end: this step is not run and no other follows."""
    stage: int
    """Of going over to compiled steps: all ranks enter it before they run this step."""


PENDING = -1
"""In place of a token id: the step before draws this token, and the plan was made ahead of it."""


class StepPlan(Wire, frozen=True):
    """One step's batch: everything that a rank needs besides its own rows' state.

    S sequences, T tokens. Sequences with a single new token come first (`num_decodes` of them),
    then those with their last token and a draft of those behind it (`num_drafting`).

    Invariant: rows, num_computed, num_new, output_index have length S = `num_seqs`; token_ids has
    length T = `num_tokens` = sum(num_new); neither counts padding. output_index[i] is the output
    position that sequence i samples in this step, or -1 if its prompt is not finished; one that
    drafts samples from there on, behind each of its tokens. Only a decode's token may be `PENDING`:
    it is the last one that its row drew.
    """

    epoch: int
    step: int
    num_seqs: int
    num_tokens: int
    admitted: list[RowAdmission]
    new_blocks: list[NewBlocks]
    rows: list[int]
    num_computed: list[int]
    num_new: list[int]
    output_index: list[int]
    token_ids: list[int]
    num_decodes: int
    num_drafting: int
    prompt_targets: list[PromptTargets]
    known_token_ids: list[int]
    """Of each sequence that samples nothing, the token behind its last one."""

    @property
    def num_drawn(self) -> list[int]:
        """How many tokens each sequence samples: [S]."""
        drawn = [int(index >= 0) for index in self.output_index]
        drafting = slice(self.num_decodes, self.num_decodes + self.num_drafting)
        drawn[drafting] = self.num_new[drafting]
        return drawn

    def drafts(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield of each sequence that drafts its index, where its draft stands among the tokens,
        and the draft."""
        end = self.num_decodes
        for i in range(self.num_decodes, self.num_decodes + self.num_drafting):
            start, end = end + 1, end + self.num_new[i]
            yield i, start, self.token_ids[start:end]

    @property
    def is_decode(self) -> bool:
        return self.num_decodes + self.num_drafting == self.num_seqs

    def vote(self, *, draining: bool = False, stage: int = 0, can_advance: bool = False) -> Vote:
        num_seqs, has_work = self.num_seqs, self.num_seqs > 0
        kind = StepKind.DECODE if self.is_decode else StepKind.MIXED
        return Vote(
            epoch=self.epoch,
            step=self.step,
            kind=kind if has_work else StepKind.NOTHING,
            num_tokens=self.num_tokens,
            num_seqs=num_seqs,
            max_query_len=max(self.num_new, default=0),
            has_work=has_work,
            draining=draining,
            stage=stage,
            can_advance=can_advance,
        )


# --- KV transfer ----------------------------------------------------------------------------


class KVRead(GrowingWire, frozen=True, tag=True):
    handoff_id: Count
    block_ids: list[Index]
    generations: list[Count]


class KVRenew(GrowingWire, frozen=True, tag=True):
    handoff_id: Count


class KVRelease(GrowingWire, frozen=True, tag=True):
    """The reader is done with the handoff; `num_blocks_read` of its blocks were copied."""

    handoff_id: Count
    num_blocks_read: Index


KVCall = KVRead | KVRenew | KVRelease


class KVAnswer(GrowingWire, frozen=True):
    """`alive` tells whether the lease held from the handoff until now."""

    handoff_id: Count
    call: Name
    """The type of the call that is answered: answers to a renewal and to a release differ."""
    alive: bool


# --- on and off the wire ----------------------------------------------------------------------


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode

T = TypeVar("T")


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode(data: bytes | memoryview, kind: type[T] | Any) -> Any:
    """Return the struct of type `kind` that `data` is, exactly; else a `FrameError` says where."""
    try:
        return _decoder(cast("Hashable", kind)).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise FrameError(
            f"frame: wanted {name}, found {len(data)} bytes that do not fit: {error}"
        ) from error


def decode_from(sender: str, data: bytes, kind: type[T] | Any) -> Any:
    """Do what `decode` does; an error names the sender too."""
    try:
        return decode(data, kind)
    except FrameError as error:
        raise FrameError(f"{sender}: {error}") from error


def checksum(content: object, start: int = 0) -> int:
    """Return 32 bits that follow from the encoded content, and from an earlier checksum."""
    return zlib.crc32(encode(content), start)
