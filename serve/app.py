"""`deploy`: the application that `serve run serve.app:deploy` starts.

Annotations stay live here: with postponed ones Ray Serve would not see the builder's parameter.
"""

import atexit
import sys
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve import Application, Deployment
from ray.serve.config import BackpressureConfig

from cluster.config import DEFAULT_NUM_CPUS, rank_bundles
from compile.errors import FieldError
from serve.config import DeployConfig, PoolConfig, deploy_config
from serve.failed_start import StartWatch
from serve.ingress import Ingress
from serve.ingress_core import RETRY_AFTER_S
from serve.listening import listen
from serve.pools.draining import INGRESS, drain_at_exit
from serve.pools.pool import Pool

MAX_ONGOING = 100_000
"""Open calls of a pool. The ingress bounds queues; a second bound would hide requests from it."""
MAX_REFUSALS = 128
"""Requests that an ingress may be refusing, or answering about its health, beside those that it
has admitted."""
MAX_AT_PROXY = 256
"""Requests that wait at Ray's proxy for an ingress that has as many as it takes; more get 429 from
the proxy, and callers by handle `BackPressureError`. Each costs proxy and ingress some
milliseconds, whatever becomes of it."""

GRACEFUL_S = 20
"""How long requests that run may take when their application is ended; then they are cut off."""


def deploy(args: dict[str, Any]) -> Application:
    """Build the application from key=value or YAML arguments, or those in `config=FILE`.

    Bad arguments end the process with exit code 1 and one line on stderr, before Ray starts; so
    does what a pool cannot start with, once that is known. Inside a cluster (`serve deploy`) bad
    arguments are raised.
    """
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
    else:
        watch.forget()
    return build(config)


def build(config: DeployConfig) -> Application:
    """Build the application: ingresses over one deployment per pool."""
    handles = {
        pool.name: _pool_deployment(pool).bind(pool, config.config_hash) for pool in config.pools
    }
    ingress = ray_serve.deployment(
        name=INGRESS,
        num_replicas=config.num_ingresses,
        graceful_shutdown_timeout_s=GRACEFUL_S,
        ray_actor_options={"num_cpus": DEFAULT_NUM_CPUS},
        max_ongoing_requests=sum(config.ingress_share) + MAX_REFUSALS,
        max_queued_requests=MAX_AT_PROXY,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        # Each line would be streamed to the terminal of `serve run`, and hundreds of clients that
        # leave at once would wait for it.
        logging_config={"enable_access_log": False},
    )(Ingress)
    return ingress.bind(config, handles)


def _pool_deployment(pool: PoolConfig) -> Deployment:
    bundles = [{"CPU": DEFAULT_NUM_CPUS}, *rank_bundles(pool.engine, pool.num_cpus)]
    return ray_serve.deployment(
        name=f"{pool.name.capitalize()}Pool",
        num_replicas=pool.replicas,
        ray_actor_options={"num_cpus": DEFAULT_NUM_CPUS},
        placement_group_bundles=bundles,
        placement_group_strategy="PACK",
        max_ongoing_requests=MAX_ONGOING,
        logging_config={"enable_access_log": False},
        health_check_period_s=1,
        graceful_shutdown_timeout_s=GRACEFUL_S,
    )(Pool)
