"""Open a checkpoint: configuration, empty model, weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from model.config import ModelConfig
from model.families import FAMILIES
from model.layers.decoder import CausalLM
from model.parallel import Shard
from model.weights import has_own_head, load_weights

log = logging.getLogger("lockstep.model")

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
    if config.tie_word_embeddings and has_own_head(Path(checkpoint_dir)):
        log.warning(
            "tie_word_embeddings: wanted a head that is the embeddings, found another one, which "
            "is used, in %s",
            checkpoint_dir,
        )
        config = replace(config, tie_word_embeddings=False)
    # A configuration that is not its checkpoint's may describe a model larger than memory: it takes
    # none before its weights were compared.
    model = FAMILIES[config.architecture](config, shard, dtype, torch.device(device))
    load_weights(model, checkpoint_dir, progress)
    return model.eval(), config
