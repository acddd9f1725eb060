"""What machine code depends on: the processor, the C++ compiler and the CUDA device."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from compile.environment import cxx

VERSION_TIMEOUT_S = 30.0
"""A compiler answers in milliseconds; one that hangs is treated as missing."""


@functools.cache
def processor() -> str:
    """Return model and features of the processor: `-march=native` compiles for both."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    fields = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split("\t")[0].strip() in fields)


def compiler_version() -> str:
    """Return what the C++ compiler calls itself; `none` where there is none."""
    compiler = shutil.which(cxx())
    if compiler is None:
        return "none"
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return (done.stdout.splitlines() or ["none"])[0]


def device() -> str:
    """Return the compute capability and name of this process's CUDA device; `cpu` without one."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda {torch.version.cuda} sm_{major}{minor} {torch.cuda.get_device_name()}"


def python() -> str:
    """Return the interpreter's ABI and the kind of machine: extensions are built for both."""
    return f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}"
