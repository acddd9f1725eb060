"""`deploy`: the application that `serve run serve.app:deploy` starts.

`serve run` ends with the reason why a pool cannot start, and with exit code 1. Ray's command prints
a trace of its own and ends with code 0. So the process that started the application looks for what
its pools have noted (`cluster/actors/gcs_store.py`): at its end, and each second while it
lives, since an application that serves while it compiles may turn out later to be one that no start
can compile. It is interrupted then, as by Ctrl-C.

Annotations stay live here: with postponed ones Ray Serve would not see the builder's parameter.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig

from cluster.actors.gcs_store import FailedStart, FailedStarts
from cluster.actors.rank_group import STOP_S
from cluster.config import DEFAULT_NUM_CPUS
from compile.errors import FieldError
from serve.config import RETRY_AFTER_S, DeployConfig, PoolConfig, deploy_config
from serve.ingress import Ingress
from serve.pools.pool import Pool
from serve.pools.scaling import ScalingPolicy
from serve.serve_run import INGRESS, drain_at_exit, listen, outlast

MAX_REFUSALS = 128
"""Requests that an ingress may be refusing, or answering about its health, beside those that it
has admitted."""
MAX_AT_PROXY = 256
"""Requests that wait at Ray's proxy for an ingress that has as many as it takes; more get 429 from
the proxy, and callers by handle `BackPressureError`. Each costs proxy and ingress some
milliseconds, whatever becomes of it."""

INGRESS_STOP_S = 5.0
"""What an ingress may take to end once its last request has."""
STOP_PERIOD_S = 0.1
"""How soon Serve runs a stopping replica's code once no call is open, which is always."""
LOOK_PERIOD_S = 1.0
"""How often pools' failures are looked for."""
CONNECT_PERIOD_S = 0.1
"""How often it is looked for Ray: before any pool can have failed, failures of an earlier
application with the same arguments are forgotten."""


def deploy(args: dict[str, Any]) -> Application:
    """Build the application from key=value or YAML arguments, or those in `config=FILE`. Bad
    arguments end the process with exit code 1 and one line on stderr, before Ray starts, and so
    does what a pool cannot start with; inside a cluster (`serve deploy`) they are raised."""
    try:
        config = deploy_config(args)
        listen(config.args.host, config.args.port)
    except FieldError as error:
        if ray.is_initialized():
            raise
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    watch = StartWatch(config.config_hash, [pool.name for pool in config.pools])
    if not ray.is_initialized():  # this is `serve run`, and no cluster that builds a YAML
        watch.start()
        atexit.register(watch.end)  # after what runs was answered
        drain_at_exit(config.args.drain_timeout_s)
        outlast(config.args.request_timeout_s)
    else:
        watch.forget()
    return build(config)


def build(config: DeployConfig) -> Application:
    hashes = config.config_hash, config.numerics_hash
    pools = [_pool_deployment(config, pool).bind(pool, *hashes) for pool in config.pools]
    ingress = ray_serve.deployment(
        name=INGRESS,
        num_replicas=config.num_ingresses,
        # Its successor is there first. What it has promised its clients it keeps: HTTP streams
        # cannot move, so it ends with its last one.
        max_surge_percent=100,
        graceful_shutdown_timeout_s=config.args.request_timeout_s + INGRESS_STOP_S,
        ray_actor_options={"num_cpus": DEFAULT_NUM_CPUS},
        max_ongoing_requests=sum(config.ingress_share(config.pools[-1].max_replicas))
        + MAX_REFUSALS,
        max_queued_requests=MAX_AT_PROXY,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        # Each line would be streamed to the terminal of `serve run`, and hundreds of clients that
        # leave at once would wait for it.
        logging_config={"enable_access_log": False},
    )(Ingress)
    return ingress.bind(config, pools)


def _pool_deployment(config: DeployConfig, pool: PoolConfig) -> Deployment:
    placement = pool.placement
    bundles = [{"CPU": DEFAULT_NUM_CPUS}, *placement.bundles(pool.engine.parallel)]
    replicas: dict[str, Any] = {"num_replicas": pool.replicas}
    if pool.is_scaled:
        policy = AutoscalingPolicy(
            policy_function=ScalingPolicy, policy_kwargs={"cool_down_s": pool.scale_down_after_s}
        )
        replicas = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=pool.min_replicas,
                initial_replicas=pool.replicas,
                max_replicas=pool.max_replicas,
                upscale_delay_s=0,
                downscale_delay_s=0,
                policy=policy,
            )
        }
    return ray_serve.deployment(
        name=f"{pool.name.capitalize()}Pool",
        **replicas,
        ray_actor_options={"num_cpus": DEFAULT_NUM_CPUS},
        placement_group_bundles=bundles,
        # Of all bundles: the replica is where its ranks may be.
        placement_group_bundle_label_selector=[placement.label_selector] * len(bundles)
        if placement.label_selector
        else None,
        placement_group_strategy=placement.strategy,
        logging_config={"enable_access_log": False},
        health_check_period_s=1,
        graceful_shutdown_wait_loop_s=STOP_PERIOD_S,
        # Bounds a replica's drain.
        graceful_shutdown_timeout_s=config.args.drain_timeout_s + STOP_S,
    )(Pool)


class StartWatch:
    """Looks for failed starts of one deployment, for as long as this process lives."""

    def __init__(self, config_hash: str, pools: Sequence[str]) -> None:
        self._failed = FailedStarts(config_hash)
        self._pools = pools

    def forget(self) -> None:
        """Forget what was noted, since the deployment is made anew."""
        for pool in self._pools:
            self._failed.forget(pool)

    def start(self) -> None:
        """Begin, on a thread of its own; it waits for Ray."""
        interrupt = signal.SIGINT
        is_main = threading.current_thread() is threading.main_thread()
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if is_main and is_ignored and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            interrupt = signal.SIGUSR1  # the background of a script ignores the other
            signal.signal(interrupt, signal.default_int_handler)
        threading.Thread(target=self._watch, args=(interrupt,), daemon=True).start()

    def end(self) -> None:
        """At this process's end: if a pool has failed, end with the reason and exit code 1."""
        if not ray.is_initialized() or not (found := self._found()):
            return
        logging.shutdown()
        ray.shutdown()  # so that nothing is written behind the reason
        sys.stdout.flush()
        print(found[0].reason, file=sys.stderr, flush=True)
        os._exit(1)  # nothing else changes the exit code that Ray's command has chosen

    def _watch(self, interrupt: signal.Signals) -> None:
        while not ray.is_initialized():
            time.sleep(CONNECT_PERIOD_S)
        with suppress(Exception):  # Ray may end at any time, in ways of its own
            self.forget()
            while not any(failed.is_final for failed in self._found()):
                time.sleep(LOOK_PERIOD_S)
            signal.pthread_kill(threading.main_thread().ident or 0, interrupt)

    def _found(self) -> list[FailedStart]:
        """Return the failures that are noted, final ones first."""
        found = [failed for pool in self._pools if (failed := self._failed.of(pool)) is not None]
        return sorted(found, key=lambda failed: not failed.is_final)
