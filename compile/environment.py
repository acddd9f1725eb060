"""The environment variables of Lockstep: read here alone, at each call. A field that is given
explicitly wins; a value that cannot be used is a FieldError."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal, get_args

from compile.errors import FieldError

CC = "CC"
CXX = "CXX"
CACHE_ROOT = "LOCKSTEP_CACHE_ROOT"
DISABLE_COMPILE_CACHE = "LOCKSTEP_DISABLE_COMPILE_CACHE"
COMPILE_CACHE_SAVE_FORMAT = "LOCKSTEP_COMPILE_CACHE_SAVE_FORMAT"
LOG_LEVEL = "LOCKSTEP_LOG_LEVEL"

SaveFormat = Literal["binary", "unpacked"]
SAVE_FORMATS = get_args(SaveFormat)
CODEGEN = ("ATEN_CPU_CAPABILITY", "TRITON_INTERPRET")
"""Variables of torch and Triton that affect generated code and are in no configuration."""


def cache_root() -> Path:
    """Return the directory of everything that is built once: `~/.cache/lockstep` by default."""
    given = os.environ.get(CACHE_ROOT)
    if given:
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"


def root_directory(cache_dir: str = "") -> Path:
    """Return where compiled forwards lie, for the field of a configuration that may name it."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    return cache_root() / "compile"


def cxx() -> str:
    """Return the C++ compiler to look for, as make and torch name it: `g++` by default."""
    return os.environ.get(CXX) or "g++"


def cc() -> tuple[str, ...]:
    """Return the C compilers that Triton looks for: gcc and clang, or the one that is named."""
    named = os.environ.get(CC)
    return (named,) if named else ("gcc", "clang")


def is_compile_cache_disabled() -> bool:
    """Return whether compiled code is neither read nor written; it is by default."""
    value = os.environ.get(DISABLE_COMPILE_CACHE) or "0"
    if value not in ("0", "1"):
        raise FieldError(DISABLE_COMPILE_CACHE, "0 or 1", value)
    return value == "1"


def compile_cache_save_format() -> str:
    """Return how compiled code is kept if no field says so: `binary` by default."""
    value = os.environ.get(COMPILE_CACHE_SAVE_FORMAT) or SAVE_FORMATS[0]
    if value not in SAVE_FORMATS:
        wanted = f"one of {', '.join(SAVE_FORMATS)}"
        raise FieldError(COMPILE_CACHE_SAVE_FORMAT, wanted, value)
    return value


def codegen_variables() -> dict[str, str]:
    """Return those of `CODEGEN`, empty if they are not set."""
    return {name: os.environ.get(name, "") for name in CODEGEN}


LOGGERS = ("lockstep", "serve", "cluster", "compile", "model")
"""The roots of Lockstep's loggers."""


def log_level() -> int:
    name = os.environ.get(LOG_LEVEL) or "INFO"
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        wanted = f"one of {', '.join(logging.getLevelNamesMapping())}"
        raise FieldError(LOG_LEVEL, wanted, name)
    return level
