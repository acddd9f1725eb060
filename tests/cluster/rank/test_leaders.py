"""Leaders over real sockets: they greet, step, diverge by name, sleep and wake together."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from local_ranks import CREDENTIALS, Ingress, config_of, open_endpoints, wait_for
from wire_structs import submit_of, vote_of

from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.divergence import StepDivergence
from cluster.engine.lockstep import JoinedLockstep, LockstepMachine, PeersSilent
from cluster.engine.step_stats import StepStats
from cluster.engine.watchdog import Phase
from cluster.group import channel, membership
from cluster.group.context import RankContext, RankPlace
from cluster.group.rendezvous import LeaderEndpoints, introduce
from cluster.rank.leader import Leader
from cluster.wire.group_messages import PeerHello, ToPeer
from cluster.wire.messages import (
    PROTOCOL_VERSION,
    FrameError,
    StepAgreement,
    StepKind,
    Vote,
    decode,
    encode,
)
from examples.bench.fault_injection import Action, Fault, Place, arm

EPOCH = 2


def vote(step: int, rank: int) -> Vote:
    return vote_of(rank + 1, epoch=EPOCH, step=step)


def machine_of(rank: int, size: int = 2) -> LockstepMachine:
    return LockstepMachine(dp_rank=rank, dp_size=size, epoch=EPOCH, switch=CompileSwitch())


class ScriptedChannel:
    """Frames of a peer that are there at once; notes the recorded phase at each wait."""

    def __init__(self, phases: StepStats, frames: list[bytes]) -> None:
        self._phases = phases
        self._frames = frames
        self.phases: list[Phase] = []

    def send(self, body: bytes) -> None:
        """Send it to nobody."""

    def receive(self, dp_rank: int, *, is_patient: bool = True) -> bytes:
        self.phases.append(self._phases.heartbeat().phase)
        return self._frames.pop(0)


def test_a_leader_that_waits_for_confirms_is_ahead_of_one_that_waits_for_votes() -> None:
    peer = machine_of(1)
    peer.vote(vote(1, 1))
    peer.on_frame(0, vote(1, 0))
    phases = StepStats(time.monotonic)
    channel = ScriptedChannel(phases, [encode(vote(1, 1)), encode(peer.conclude())])
    lockstep = JoinedLockstep(machine_of(0), channel, phases)
    lockstep.agree(vote(1, 0))
    lockstep.wait_for_peers()
    assert channel.phases == [Phase.AGREEING, Phase.BUILDING]


@contextmanager
def join_all(size: int, **hello: dict[int, Any]) -> Iterator[list[Any]]:
    """Yield what joining came to on each rank, lockstep or error; `hello` alters fields by rank."""

    def join(rank: int) -> JoinedLockstep | FrameError:
        mine = PeerHello(PROTOCOL_VERSION, "test", EPOCH, told[rank].nonce, rank, size, 0)
        changed = {name: by_rank[rank] for name, by_rank in hello.items() if rank in by_rank}
        sockets = opened[rank].peers
        try:
            altered = msgspec.structs.replace(mine, **changed)
            sockets.open(told[rank].earlier, altered, lambda name: None)
        except FrameError as error:
            return error
        return JoinedLockstep(machine_of(rank, size), sockets, StepStats(time.monotonic))

    with open_endpoints(1, size) as (opened, told):
        with ThreadPoolExecutor(size) as threads:
            joined = list(threads.map(join, range(size)))
        yield joined


@pytest.mark.parametrize("size", [2, 4])
def test_leaders_agree_over_sockets(size: int) -> None:
    def step(rank: int, lockstep: JoinedLockstep) -> list[StepAgreement]:
        found = []
        for number in range(1, 51):
            found.append(lockstep.agree(vote(number, rank)))
            lockstep.wait_for_peers()
        return found

    with join_all(size) as joined, ThreadPoolExecutor(size) as threads:
        results = list(threads.map(step, range(size), joined))
    assert all(found == results[0] for found in results)
    assert results[0][-1].num_scheduled_tokens == tuple(range(1, size + 1))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epoch", 1, "epoch: wanted 2, found 1"),
        ("config_hash", "other", "config_hash: wanted test, found other"),
        ("dp_rank", 0, "leader dp=1: dp_rank: wanted 1, found 0"),
        ("dp_size", 3, "leader dp=1: dp_size: wanted 2, found 3"),
        ("graphs", 7, "leader dp=1: graphs: wanted 0, found 7"),
    ],
)
def test_a_leader_of_another_group_is_refused_by_name(
    field: str, value: object, message: str
) -> None:
    with join_all(2, **{field: {1: value}}) as (first, _):
        assert isinstance(first, FrameError)
        assert str(first) == message


def test_a_leader_that_does_not_vote_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SILENCE_TIMEOUT_S", 0.2)
    wanted = r"^rank dp=1 tp=0 epoch=2, rank dp=3 tp=0 epoch=2 step 1: "
    with join_all(4) as (first, _, third, _):
        with pytest.raises(PeersSilent):
            third.agree(vote(1, 2))
        with pytest.raises(PeersSilent, match=wanted):
            first.agree(vote(1, 0))


# --- whole leaders ------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    """Two leaders, on threads of this process, and an ingress."""

    leaders: list[Leader]
    ingress: Ingress
    sends: list[Callable[[bytes], None]]
    threads: list[threading.Thread] = dataclasses.field(default_factory=list)
    noticed_at: dict[int, float] = dataclasses.field(default_factory=dict)

    def submit(self, rank: int, request_id: str, num_tokens: int) -> None:
        self.sends[rank](encode(submit_of(request_id, [1, 2, 3], max_tokens=num_tokens)))

    def submit_to_both(self) -> None:
        """Submit `a` to the first and `b` to the second; return once both inboxes have one."""
        for rank, name in enumerate("ab"):
            self.submit(rank, name, 20)
        wait_for(lambda: all(leader._inbox.socket.poll(10) for leader in self.leaders))

    def steps_asleep(self) -> list[int]:
        """Wait until both leaders sleep behind the same step; return it for each."""

        def steps() -> list[int]:
            agreed = [leader.engine.agreed for leader in self.leaders]
            found = [each.step for each in agreed if each is not None]
            is_idle = all(leader.engine.is_idle for leader in self.leaders)
            return found if is_idle and len(found) == 2 and len(set(found)) == 1 else []

        return wait_for(steps)

    def tokens_told(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return how many tokens were told of each request, waiting for as many as are wanted."""
        told = dict.fromkeys(wanted, 0)
        deadline = time.monotonic() + 60
        receive = self.ingress.receive
        while (outputs := receive(0.1)) or (told != wanted and time.monotonic() < deadline):
            for output in outputs:
                told[output.request_id] += len(output.token_ids)
        return told


@pytest.fixture
def pair(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # Who does not notice itself that its peer has stopped ends soon.
    monkeypatch.setattr(channel, "SILENCE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(membership, "END_TIMEOUT_S", 0.05)
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": (1, 2)}
    config = config_of(oracle.path, 128, parallel=(1, 2), level=0, **graphs)
    contexts = [
        RankContext(config, RankPlace(rank, 0, EPOCH), credentials=CREDENTIALS) for rank in range(2)
    ]
    opened = [LeaderEndpoints(context) for context in contexts]
    told = introduce([m.rendezvous for m in opened if m.rendezvous is not None])

    def lead(rank: int) -> Leader:
        return Leader(contexts[rank], opened[rank], told[rank])

    with ThreadPoolExecutor(2) as threads:
        leaders = list(threads.map(lead, range(2)))
    # The first step of a process may have to build the attention kernel.
    leaders[0].runner.forward.run_sizes()
    ingress = Ingress()
    made = Pair(leaders, ingress, [ingress.inbox(leader.inbox) for leader in leaders])
    yield made
    for thread in made.threads:
        thread.join(timeout=60)
    ingress.close()


def run_both(pair: Pair, *, stays_open: bool = False) -> dict[int, Exception]:
    """Set both leaders running; return where their errors will be.

    Who raises closes its sockets, or keeps them as a process does until its owner kills it.
    """
    errors: dict[int, Exception] = {}

    def run(rank: int) -> None:
        leader = pair.leaders[rank]
        try:
            leader.run()
        except Exception as error:
            errors[rank] = error
            pair.noticed_at[rank] = time.monotonic()
            if not stays_open:
                leader._close()

    pair.threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in pair.threads:
        thread.start()
    return errors


class AlteringChannel:
    """A leader's sockets to its peers that change fields of the vote in one step."""

    def __init__(self, sockets: Any, step: int, fields: dict[str, Any]) -> None:
        self._sockets, self._step, self._fields = sockets, step, fields
        self.receive = sockets.receive

    def send(self, body: bytes) -> None:
        frame = decode(body, ToPeer)
        if isinstance(frame, Vote) and frame.step == self._step:
            body = encode(msgspec.structs.replace(frame, **self._fields))
        self._sockets.send(body)


@pytest.mark.feature("P13")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"epoch": 1}, "epoch: wanted 2, found 1"),
        ({"step": 7}, "step: wanted 4, found 7"),
        ({"kind": StepKind.MIXED}, "kind: wanted 2, found 1"),
        ({"num_tokens": 2}, "num_tokens: wanted 1, found 2"),
        ({"num_seqs": 3}, "num_tokens: wanted 3, found 1"),
        ({"max_query_len": 9}, "num_tokens: wanted 9, found 1"),
        (
            {"num_tokens": 2, "num_seqs": 2},
            r"batch: wanted BatchDescriptor\(num_tokens=2, num_seqs=2, .*, found .*num_seqs=1, .*",
        ),
        ({"num_tokens": 99, "num_seqs": 99}, "mode: wanted 0, found 2"),
        (
            {"num_tokens": 0, "num_seqs": 0},
            r"num_scheduled_tokens: wanted \(1, 0\), found \(1, 1\)",
        ),
    ],
)
def test_a_leader_in_another_step_is_named_before_a_token_of_it_leaves(
    pair: Pair, fields: dict[str, Any], named: str
) -> None:
    """Whose frames are altered from step 4 on is named by its peer; no token of step 4 is told."""
    lockstep: Any = pair.leaders[1].engine.lockstep
    lockstep._channel = AlteringChannel(lockstep._channel, 4, fields)
    pair.submit_to_both()
    began = time.monotonic()
    errors = run_both(pair)
    pair.threads[0].join(timeout=60)
    assert not pair.threads[0].is_alive()
    took = pair.noticed_at[0] - began
    *log, last = str(errors[0]).splitlines()
    assert isinstance(errors[0], StepDivergence)
    with pytest.raises(StepDivergence, match=rf"rank dp=1 tp=0 epoch=2 step [47]: {named}$"):
        raise errors[0]
    assert [line.split(":")[0] for line in log] == [f"ran epoch 2 step {n}" for n in (1, 2, 3)]
    print(f"{last!r} after {took:.3f} s")
    assert took < 120
    # One token of each sequence in each of the three steps; nothing of the fourth.
    wanted = {"a": 3, "b": 3}
    assert pair.tokens_told(wanted) == wanted
    assert [step["step"] for step in pair.leaders[0].runner.step_stats.as_dicts()] == [1, 2, 3]


@pytest.mark.feature("P13")
@pytest.mark.parametrize("field", StepAgreement.__struct_fields__)
def test_a_leader_that_agrees_on_something_else_ends_both_before_a_token_of_the_step(
    pair: Pair, field: str, tmp_path: Path
) -> None:
    """Whatever field of the agreement differs on one rank."""
    note = tmp_path / "note"
    arm(pair.leaders[1], Fault(Place.DECODE, Action.DIVERGE, str(note), field))
    pair.submit_to_both()
    errors = run_both(pair, stays_open=True)
    for thread in pair.threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    step = int(note.read_text().split()[0])
    told = step + 1 if field == "step" else step  # by whom it is altered
    message = rf"rank dp=1 tp=0 epoch=2 step {told}: {field}: wanted .*, found .*"
    assert re.fullmatch(message, str(errors[0]).splitlines()[-1])
    # It may not be able to run what it agreed on: it told its peer before.
    assert isinstance(errors[1], StepDivergence | ValueError)
    wanted = {"a": step - 1, "b": step - 1}
    assert pair.tokens_told(wanted) == wanted
    for leader in pair.leaders:
        assert [each["step"] for each in leader.runner.step_stats.as_dicts()] == list(
            range(1, step)
        )
        leader._close()


@pytest.mark.feature("P02")
def test_a_group_sleeps_by_agreement_wakes_with_its_first_vote_and_ends_together(
    pair: Pair,
) -> None:
    errors = run_both(pair)
    for i in range(6):
        steps = pair.steps_asleep()
        pair.submit(i % 2, str(i), 2)
        finish = ""
        while not finish:
            [output] = pair.ingress.receive(5.0)
            assert output.request_id == str(i)
            finish = output.finish_reason
        pair.steps_asleep()
        time.sleep(0.02)
        # Two steps with work and the one that lets them sleep; nobody spins, and at most one
        # leader has looked around by itself meanwhile.
        ended = pair.steps_asleep()
        assert 3 <= ended[0] - steps[0] <= 5
    # The rank without a request ran all the same steps, as dummies.
    first, second = (leader.runner.step_stats.as_dicts() for leader in pair.leaders)
    assert first == second
    assert [step["num_scheduled_tokens"] for step in first[:4]] == [(3, 0), (1, 0), (0, 3), (0, 1)]
    pair.leaders[1].stop()
    pair.threads[1].join(timeout=0.2)
    assert pair.threads[1].is_alive()  # its peer was not told to end
    pair.submit(1, "last", 2)
    assert pair.ingress.receive(5.0) and pair.ingress.receive(5.0)  # and until then it serves
    pair.leaders[0].stop()
    for thread in pair.threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not errors
