"""The compilation fields among the arguments of `deploy` and `LLM`.

One set of fields is asked of all pools, and each pool resolves it by itself, with the preset that
fits its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config import SchedulerConfig
from compile.aliases import fields_of
from compile.config import DEFAULT_SPLITTING_OPS, FIELDS, CompilationConfig, CompilationLevel
from compile.errors import FieldError
from compile.resolve import PRESETS, StepLimits, resolve
from compile.validate import read_json

DEFAULT_LEVEL = int(CompilationLevel.PIECEWISE)
"""What is compiled where no level is given."""

LOCAL_FIELDS = ("cache_dir", "debug_dump_path")
"""Where a machine keeps files: processes need not agree on it."""


def as_object(value: Any) -> Any:
    """Return a level or a configuration as an object of fields; other values as they are."""
    if isinstance(value, CompilationConfig):
        fields = value.to_dict()
        return {name: fields[name] for name in FIELDS}
    level = read_json(value) if isinstance(value, str) else value
    return {"level": level} if isinstance(level, int) else value


def given_fields(given: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the fields that are given, by whichever name, as they are kept.

    Args:
        given: `compilation.*`.
        sections: `torch_compile_config` and `cuda_graph_config`, those that are given.

    Raises:
        FieldError: a field is unknown, holds what cannot be used, or is given twice.
    """
    return fields_of(given, **sections)


def requested(fields: Mapping[str, Any]) -> CompilationConfig:
    """Return what all pools are asked for.

    Raises:
        FieldError: fields contradict each other.
    """
    return CompilationConfig(**{"level": DEFAULT_LEVEL, **fields})


def resolved(
    fields: Mapping[str, Any],
    scheduler: SchedulerConfig,
    pool: str,
    *,
    enforce_eager: bool,
    device: str,
    is_served: bool = True,
) -> CompilationConfig:
    """Return what the engines of a pool run; a rank's attention backend may still reduce it.

    Raises:
        FieldError: fields contradict each other, or no size is left to capture.
    """
    asked = requested(fields)
    limits = StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return resolve(
        asked,
        limits,
        preset=PRESETS[pool],
        enforce_eager=enforce_eager,
        device=device,
        is_served=is_served,
    )


def check_names(config: CompilationConfig) -> None:
    """Refuse ops and options of the compiler that do not exist: with them no start could compile.

    Only torch and the model know the names, so both are imported, which takes seconds: not where
    no name is given.

    Raises:
        FieldError: names the field and what is unknown.
    """
    ops = set(config.splitting_ops or ()) - set(DEFAULT_SPLITTING_OPS) if config.can_split else ()
    has_options = config.inductor_compile_config and config.level >= CompilationLevel.DYNAMO_ONCE
    if ops:
        import model.weights  # noqa: F401  (registers its ops)
        from compile.pieces.split import SplittingOps

        SplittingOps(config.splitting_ops or ())
    if has_options:
        from compile.cache.inductor import make_compiler

        make_compiler(config)


def shared_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on which processes that work together must agree, as JSON has them."""
    facts = requested(fields).to_dict()
    return {name: value for name, value in facts.items() if name not in LOCAL_FIELDS}


def refuse_speculation(config: Mapping[str, Any]) -> None:
    """Refuse `speculative_config` by name; a draft model with its own engine will stay refused.

    Raises:
        FieldError: anything is given.
    """
    for name in ("mtp_eagle_one_model", "eagle3_one_model"):
        value = config.get(name)
        if (read_json(value) if isinstance(value, str) else value) is False:
            wanted = "true (two model engines cannot be compiled as one forward)"
            raise FieldError(f"speculative_config.{name}", wanted, False)
    if config:
        wanted = "nothing (speculation is not built yet)"
        raise FieldError("speculative_config", wanted, dict(config))
