"""`deploy`: the application that `serve run serve.app:deploy` starts.

Annotations stay live here: with postponed ones Ray Serve would not see the builder's parameter.
"""

import sys
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve import Application, Deployment

from cluster.actors.placement import rank_bundles
from cluster.config import DEFAULT_NUM_CPUS, ConfigError
from serve.config import DeployConfig, PoolConfig, deploy_config
from serve.ingress import Ingress
from serve.pools import Pool

MAX_ONGOING = 100_000
"""Queues are bounded by the ingress; a second bound in Serve would only hide requests from it."""


def deploy(args: dict[str, Any]) -> Application:
    """Build the application from key=value or YAML arguments.

    Bad arguments end the process with exit code 1 and one line on stderr, before Ray starts;
    inside a cluster (`serve deploy`) they are raised.
    """
    try:
        return build(deploy_config(args))
    except ConfigError as error:
        if ray.is_initialized():
            raise
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


def build(config: DeployConfig) -> Application:
    """Build the application: an ingress over one deployment per pool."""
    handles = {
        pool.name: _pool_deployment(pool).bind(pool, config.config_hash) for pool in config.pools
    }
    ingress = ray_serve.deployment(
        name="Ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": DEFAULT_NUM_CPUS},
        max_ongoing_requests=MAX_ONGOING,
        # A line for each request would stream to the terminal of `serve run`: hundreds of clients
        # that leave at once would wait for it.
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
        graceful_shutdown_timeout_s=20,
    )(Pool)
