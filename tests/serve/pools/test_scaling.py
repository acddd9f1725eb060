"""How many replicas a pool is scaled to: what `decide` promises for all signals."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema

from cluster.actors.reports import GroupReport, ReplicaReport, ScalingTargets
from cluster.actors.status_board import StatusBoard
from cluster.group.context import RankPlace, RankStats
from cluster.observe.counts import BUCKET
from cluster.observe.metrics import SchedulerStats
from serve.app import _pool_deployment
from serve.config import deploy_config
from serve.pools.scaling import (
    COOL_DOWN_S,
    LOW,
    MAX_BUSY,
    MAX_WAIT,
    PERIOD_S,
    Memory,
    Meter,
    ScalingPolicy,
    Signals,
    StepTimes,
    decide,
    load_of,
)

OPERATING = Path(__file__).resolve().parents[3] / "serve" / "docs" / "operating.md"
MOST = 12


def signals_of(
    busy: float = 0.0, queued_s: float = 0.0, tokens: float = 0.0, rows: int = 0, ready: int = MOST
) -> Signals:
    return Signals(
        num_ready=ready,
        num_draining=0,
        num_rebuilding=0,
        ttft_target_s=2.0,
        tpot_target_s=0.05,
        start_s=30.0,
        prompts_busy=busy,
        queued_s=queued_s,
        decode_tokens_per_s=tokens,
        num_rows=rows,
        rows_at_target=20.0,
        step_s_at_target=0.05,
    )


loads = st.builds(
    signals_of,
    st.floats(0, MOST),
    st.floats(0, 200),
    st.floats(0, 2000),
    st.integers(0, 400),
    st.integers(0, MOST),
)
bounds = st.tuples(st.integers(1, MOST), st.integers(1, MOST)).map(sorted)


class Scaled:
    """A pool whose wishes are granted at once."""

    def __init__(self, n: int, least: int = 1, most: int = MOST) -> None:
        self.n, self.least, self.most = n, least, most
        self.now, self.memory = 0.0, Memory()
        self.steps: list[int] = []

    def see(self, signals: Signals, seconds: float = PERIOD_S) -> int:
        decision, self.memory = decide(
            signals, self.n, self.now, least=self.least, most=self.most, memory=self.memory
        )
        self.now += seconds
        if decision.wanted != self.n:
            self.steps.append(decision.wanted - self.n)
        self.n = decision.wanted
        return self.n

    def serve(self, signals: Signals, seconds: float = PERIOD_S) -> int:
        return self.see(replace(signals, num_ready=self.n), seconds)


def scaled_by(signals: Signals, share: float) -> Signals:
    return replace(
        signals,
        prompts_busy=share * signals.prompts_busy,
        queued_s=share * signals.queued_s,
        decode_tokens_per_s=share * signals.decode_tokens_per_s,
        num_rows=math.floor(share * signals.num_rows),
    )


@pytest.mark.feature("R16")
@given(loads, st.integers(1, MOST), bounds)
def test_a_constant_load_moves_a_pool_in_one_direction_until_it_stands(
    signals: Signals, n: int, least_most: list[int]
) -> None:
    pool = Scaled(n, *least_most)
    pool.serve(signals)  # into its bounds
    pool.steps.clear()
    for _ in range(2 * MOST):
        pool.serve(signals, COOL_DOWN_S)
    assert len({step > 0 for step in pool.steps}) <= 1
    stands_at = pool.n
    assert [pool.serve(signals, COOL_DOWN_S) for _ in range(9)] == [stands_at] * 9


@pytest.mark.feature("R16")
@given(loads, st.integers(1, MOST), st.lists(st.floats(LOW + 1e-9, 1), min_size=50, max_size=50))
def test_a_load_that_varies_by_less_than_the_band_never_moves_it_up_and_down(
    signals: Signals, n: int, shares: list[float]
) -> None:
    """A share of rows is cut to whole ones, which may leave the band where there are few."""
    signals = replace(signals, num_rows=0)
    pool = Scaled(n)
    for share in shares:
        pool.serve(scaled_by(signals, share), COOL_DOWN_S)
    assert len({step > 0 for step in pool.steps}) <= 1


@given(loads, st.floats(1, 3), st.integers(1, MOST), bounds, st.booleans())
def test_a_higher_load_never_wants_fewer_and_bounds_always_hold(
    signals: Signals, times: float, n: int, least_most: list[int], is_calm: bool
) -> None:
    least, most = least_most
    memory = Memory(calm_since=-COOL_DOWN_S if is_calm else None)
    wanted = [
        decide(each, n, 0.0, least=least, most=most, memory=memory)[0].wanted
        for each in (signals, scaled_by(signals, times))
    ]
    assert least <= wanted[0] <= wanted[1] <= most


@given(loads, st.integers(2, MOST), st.integers(0, 3), st.integers(0, 3))
def test_nothing_goes_while_a_replica_drains_or_rebuilds(
    signals: Signals, n: int, num_draining: int, num_rebuilding: int
) -> None:
    pool = Scaled(n)
    pool.memory = Memory(calm_since=-2 * COOL_DOWN_S)
    signals = replace(signals, num_draining=num_draining, num_rebuilding=num_rebuilding)
    assert pool.serve(signals) >= n or num_draining == num_rebuilding == 0


def test_a_pool_goes_up_at_once_and_down_by_one_after_each_cool_down() -> None:
    pool = Scaled(1)
    assert pool.serve(signals_of(busy=2.9 * MAX_BUSY)) == 3
    idle = signals_of()
    went = [pool.serve(idle, 1.0) for _ in range(1000)]
    assert [went.index(2), went.index(1)] == [COOL_DOWN_S, 2 * COOL_DOWN_S + 1]
    assert pool.steps == [2, -1, -1]


def test_what_starts_counts_and_a_queue_asks_for_no_more_until_it_serves() -> None:
    pool = Scaled(1)
    late = signals_of(queued_s=4.0, ready=1)  # twice the target, and soon worked off
    assert pool.see(late) == 2
    assert [pool.see(late, 1.0) for _ in range(20)] == [2] * 20
    assert pool.see(replace(late, num_ready=2)) == 3


def test_a_replica_that_cannot_be_placed_does_not_keep_a_pool_large() -> None:
    """Those that serve are enough, and Serve takes the one that does not first."""
    pool = Scaled(3)
    idle = signals_of(busy=0.8 * MAX_BUSY, ready=1)
    assert [pool.see(idle, COOL_DOWN_S) for _ in range(4)] == [3, 2, 2, 1]
    others = Scaled(3)
    assert [others.see(replace(idle, num_ready=0), COOL_DOWN_S) for _ in range(4)] == [3] * 4


def test_a_step_down_that_is_undone_soon_doubles_the_wait_for_the_next() -> None:
    """The load depends on the number here, as it should not: less is seen where more serve."""
    pool = Scaled(2)
    for _ in range(6 * 3600):
        pool.serve(signals_of(busy=0.84 * MAX_BUSY if pool.n > 1 else 1.1 * MAX_BUSY), 1.0)
    assert len(pool.steps) <= 24, "after 5 minutes, 10, 20, and then 40: 144 without"


def test_prompts_and_rows_of_a_mixed_pool_add_up() -> None:
    """Each replica divides its time among them."""
    load = load_of(signals_of(busy=MAX_BUSY, queued_s=15.0, tokens=360.0, rows=36))
    assert load.steady == pytest.approx(1 + 1) and load.surge == pytest.approx(1 + 0.5 + 2)
    assert load.late == pytest.approx(7.5 / MAX_WAIT)


def test_step_times_tell_how_many_rows_keep_a_target() -> None:
    steps = StepTimes()
    assert steps.rows_within(0.05, 64) == (64, 0.05), "as long as nothing is known"
    for rows in (10, 20, 30):
        steps.add(rows, 0.01 + 0.001 * rows, now=0.0)
    assert steps.rows_within(0.05, 64) == pytest.approx((40, 0.05))
    assert steps.rows_within(0.05, 10) == pytest.approx((10, 0.02))
    assert steps.rows_within(0.001, 64)[0] == 1, "a target that none keeps"
    assert steps.rows_within(9.0, 64)[0] == 60, "no further than twice of what was seen"
    alike = StepTimes()
    alike.add(4, 0.02, now=0.0)
    assert alike.rows_within(0.03, 64) == pytest.approx((6, 0.03)), (
        "in proportion, if nothing is known"
    )


# What the board says, and what the policy makes of it.


class Pool:
    """A mixed pool on a real status board: what its leaders count and have to do."""

    def __init__(self, pool: str = "mixed") -> None:
        self.board, self.meter = StatusBoard([pool]), Meter()
        self.name, self.now = pool, 0.0
        self.counts: dict[str, Counter[tuple[str, ...]]] = {}
        self.first_tokens = 0

    def push(self, replica: str, state: str = "ready", **load: int) -> None:
        place = RankPlace(0, 0, 0)
        rank = RankStats(place, 7, "node", "ready", scheduler=SchedulerStats(**load))
        counts = dict(self.counts.setdefault(replica, Counter()))
        group = GroupReport([rank], [], [counts] if state == "ready" else [])
        targets = ScalingTargets(2.0, 0.05, 64, 1)
        self.board.push(ReplicaReport(self.name, replica, state, group, targets=targets))

    def prompts(self, replica: str, num: int, seconds: float) -> None:
        self.counts.setdefault(replica, Counter()).update(
            {
                ("steps_total", "none", "mixed"): num,
                ("step_seconds_total", "mixed"): seconds,
                ("scheduled_tokens_total",): 100 * num,
                ("prompt_tokens_computed_total",): 100 * num,
            }
        )
        self.first_tokens += num

    def decodes(self, replica: str, steps: int, rows: int, step_s: float) -> None:
        self.counts.setdefault(replica, Counter()).update(
            {
                ("steps_total", "full", "decode"): steps,
                ("step_seconds_total", "decode"): steps * step_s,
                ("scheduled_tokens_total",): steps * rows,
            }
        )

    def see(self, seconds: float = 10.0) -> Signals:
        self.now += seconds
        bucket = ("time_to_first_token_seconds", BUCKET, "1.0")
        self.board.count("ingress", {bucket: self.first_tokens})
        return self.meter.see(self.board.scale(self.name, None), self.now)


@pytest.mark.feature("R16")
def test_signals_are_what_leaders_counted_and_have_to_do() -> None:
    pool = Pool()
    pool.push("a")
    pool.see()
    pool.prompts("a", num=20, seconds=4.0)
    pool.push("a", num_waiting=5, num_running=10, num_blocks=100, num_free_blocks=60)
    pool.push("b", "draining", num_blocks=100, num_free_blocks=100)
    pool.push("c", "restarting", num_blocks=100, num_free_blocks=100)
    found = pool.see()
    assert (found.num_ready, found.num_draining, found.num_rebuilding) == (1, 1, 1)
    assert found.prompts_busy == pytest.approx(0.4)
    assert found.queued_s == pytest.approx(5 * 0.2), "each took 0.2 s"
    assert found.num_rows == 10 and found.rows_at_target == 25, "four blocks each"
    assert found.decode_tokens_per_s == 0
    for rows in (4, 8):
        pool.decodes("a", steps=100, rows=rows, step_s=0.01 + rows * 0.001)
        pool.push("a", num_blocks=100, num_free_blocks=100)
        found = pool.see()
    assert found.decode_tokens_per_s == pytest.approx(1200 / 30), "of the last half minute"
    assert found.rows_at_target == pytest.approx(16), "twice as many as were tried"
    assert found.step_s_at_target == pytest.approx(0.026)


def test_sequences_that_wait_in_a_decode_pool_want_rows_and_in_another_to_be_computed() -> None:
    for name, rows, queued_s in (("decode", 7, 0.0), ("prefill", 0, 0.6), ("mixed", 4, 0.6)):
        pool = Pool(name)
        pool.push("a")
        pool.see()
        pool.prompts("a", num=10, seconds=2.0)
        pool.push("a", num_waiting=3, num_running=4)
        found = pool.see()
        assert (found.num_rows, found.queued_s) == (rows, pytest.approx(queued_s)), name


def test_how_long_a_replica_loads_is_measured() -> None:
    pool = Pool()
    pool.push("a", "loading")
    assert pool.see(1.0).start_s == 30
    pool.push("a", "loading")
    pool.see(7.0)
    pool.push("a")
    assert pool.see(5.0).start_s == 12


class Context(NamedTuple):
    """The part of Serve's that the policy reads."""

    target_num_replicas: int
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 5
    app_name: str = "app"
    deployment_name: str = "MixedPool"


def test_without_news_a_policy_wants_what_is_and_never_raises() -> None:
    policy = ScalingPolicy()
    for n in (1, 3, 9):
        assert policy(Context(n)) == (n, {})  # type: ignore[arg-type]
    policy._news.signals, policy._news.at = signals_of(busy=4.0), time.monotonic()
    assert policy(Context(1)) == (5, {})  # type: ignore[arg-type]
    policy._news.at -= 60
    assert policy(Context(3)) == (3, {})  # type: ignore[arg-type]


CONTROLLER = """
import sys, pickle
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("serve", "cluster", "model", "compile", "msgspec", "torch"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
policy = pickle.loads(sys.stdin.buffer.read())()
class Context:
    target_num_replicas, capacity_adjusted_min_replicas, capacity_adjusted_max_replicas = 2, 1, 5
    app_name, deployment_name = "app", "MixedPool"
    def __init__(self): pass
print(policy(Context()))
"""


def test_the_policy_runs_where_lockstep_is_not_installed() -> None:
    """Serve's controller gets it pickled, module and all."""
    pickled = AutoscalingPolicy(policy_function=ScalingPolicy).get_serialized_policy_def()
    done = subprocess.run(
        [sys.executable, "-c", CONTROLLER], input=pickled, capture_output=True, check=False
    )
    assert done.stdout.decode().strip().endswith("(2, {})"), done.stderr.decode()


def overridden(deployments: list[dict[str, Any]]) -> tuple[Any, str]:
    """Return what Serve makes of a pool that is scaled and a YAML, and the version of all pools."""
    config = deploy_config({"decode.max_replicas": 2})
    pool = _pool_deployment(config, config.pools[1])
    scaling = pool._deployment_config.autoscaling_config
    assert scaling is not None
    schema = ServeApplicationSchema(import_path="serve.app:deploy", deployments=deployments)
    info = DeploymentInfo(
        deployment_config=pool._deployment_config,
        replica_config=pool._replica_config,
        start_time_ms=0,
        deployer_job_id="",
    )
    policies = {"DecodePool": scaling.policy.get_serialized_policy_def()}
    found = override_deployment_info({"DecodePool": info}, schema, policies)["DecodePool"]
    return found.deployment_config.autoscaling_config, get_app_code_version(schema)


@pytest.mark.feature("R16")
def test_bounds_change_as_the_operating_page_says_and_restart_nothing() -> None:
    [block] = re.findall(r"```yaml\n(deployments:.*?)```", OPERATING.read_text(), re.DOTALL)
    deployments = yaml.safe_load(block)["deployments"]
    scaling, version = overridden(deployments)
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert scaling.initial_replicas is None, "there are as many as there were"
    assert scaling.upscale_delay_s == scaling.downscale_delay_s == 0
    assert scaling.policy.get_policy().__name__ == "ScalingPolicy"
    deployments[0]["autoscaling_config"]["max_replicas"] = 7
    more, same_version = overridden(deployments)
    assert more.max_replicas == 7 and same_version == version
    fixed, _ = overridden([{"name": "DecodePool", "num_replicas": 3}])
    assert fixed.policy.policy_function == "serve.pools.scaling.ScalingPolicy", "it decides"
    bare = {"name": "DecodePool", "autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}
    assert overridden([bare])[0].policy.is_default_policy_function()
