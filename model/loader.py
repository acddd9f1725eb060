"""Open a checkpoint: configuration, empty model, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from model.config import ModelConfig
from model.families import FAMILIES
from model.layers.decoder import CausalLM
from model.parallel import Shard
from model.weights import load_weights

ALONE = Shard()


def load_model(
    checkpoint_dir: Path | str,
    *,
    shard: Shard = ALONE,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """Return one rank's model in eval mode, without gradients, and its configuration.

    Args:
        dtype: of parameters and activations; the checkpoint's tensors are converted.
        progress: called with (tensors done, tensors in all).

    Raises:
        ModelError: the checkpoint cannot be used, or not by this many ranks.
    """
    config = ModelConfig.from_dir(checkpoint_dir)
    # A configuration that is not its checkpoint's may describe a model larger than memory: it takes
    # none before its weights were compared.
    model = FAMILIES[config.architecture](config, shard, dtype, torch.device(device))
    load_weights(model, checkpoint_dir, progress)
    return model.eval(), config
