"""`adapter_config.json`: what PEFT says of a LoRA adapter (Hu et al., 2021).

An adapter adds a product of two narrow matrices to the weights W of some linear layers, which then
compute x (W + s B A)^T. The scale s is alpha / rank, or alpha / sqrt(rank) of rank-stabilized
adapters (Kalajdzievski, 2023).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from compile.errors import FieldError
from model.fields import Source, convert, says
from model.files import read_json, refused

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 512
"""vLLM's bound. What is added costs as much as a layer of that width, for every adapter."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    # The others change the weights that the adapter is added to.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Fields by which an adapter is more than two matrices for a layer, and the values that say that it
is not; the first is that of an omitted one."""

_Rank = Annotated[int, Meta(ge=1, le=MAX_RANK), says(f"a rank from 1 to {MAX_RANK}")]


_Value = TypeVar("_Value", int, float)


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A file's fields; those that change nothing here are ignored."""

    peft_type: Literal["LORA"]
    r: _Rank
    lora_alpha: float
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    exclude_modules: Any = None
    layers_to_transform: Any = None

    @classmethod
    def from_dir(cls, directory: Path) -> LoraConfig:
        """Read the configuration of an adapter; a FieldError names the file and a field that is
        missing, or that asks for what is not built."""
        path = directory / CONFIG_FILE
        values = read_json(path)
        for name, taken in _REFUSED.items():
            if (found := values.get(name, taken[0])) not in taken:
                raise refused(name, " or ".join(map(repr, taken)), found, path)
        try:
            config = convert(values, cls, Source.PYTHON)
        except FieldError as error:
            raise refused(error.field, error.wanted, error.found, path) from error
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(config, name) or {}:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise refused(name, "regular expressions", pattern, path) from error
        return config

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module's two matrices."""
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check_targets(self, modules: Collection[str], known: Collection[str], path: Path) -> None:
        """Refuse names of modules that no layer has, and layers of that name without matrices.
        `modules` have some, `known` may have. An expression, or a choice of layers, leaves it to
        the matrices which layers there are."""
        if not isinstance(self.target_modules, list):
            return
        is_whole = not (self.exclude_modules or self.layers_to_transform is not None)
        for target in self.target_modules:
            named = [name for name in known if name == target or name.endswith(f".{target}")]
            if not named:
                wanted = "linear layers of attention and of dense MLPs (others are not built yet)"
                raise refused("target_modules", wanted, target, path / CONFIG_FILE)
            if is_whole and (missing := [name for name in named if name not in modules]):
                wanted = "lora_A and lora_B of each module that target_modules names"
                raise refused(f"module {missing[0]}", wanted, "none", path)


def _by_pattern(patterns: dict[str, _Value] | None, module: str, default: _Value) -> _Value:
    """Return the value of the first pattern that is a module's name, or its end behind a dot."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
