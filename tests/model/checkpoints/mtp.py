"""Makes of a DeepSeek-V3 model's last layer one that predicts a token more, and computes what that
says: float32, whole sequences at once, no cache, with transformers' decoder layer in its middle.

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

EMBEDDED = 3.0
"""Size of embeddings, where they enter the model and where they enter the layer."""
QUIET = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


@dataclass
class MTPReference:
    """The layer, and the model before it, which is the rest."""

    model: Any
    block: Any
    weights: dict[str, torch.Tensor]

    @torch.inference_mode()
    def gaps(self, token_ids: list[int], draft: list[int]) -> list[float]:
        """Return of each draft token behind a sequence how far its logit is below the best one's.
        Each but the first is judged by what the layer itself returned for the token before."""
        hidden = self.model.model(torch.tensor([token_ids])).last_hidden_state[0, :-1]
        behind, gaps = token_ids[1:], list[float]()
        for token in draft:
            ahead = self._ahead(behind, hidden)[-1:]
            [logits] = self.model.lm_head(ahead)
            gaps.append(float(logits.max() - logits[token]))
            behind, hidden = [*behind, token], torch.cat((hidden, ahead))
        return gaps

    def _ahead(self, behind: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, E]. behind: the token behind each position; hidden: [T, E]"""
        embedded = self.model.model.embed_tokens(torch.tensor(behind))
        embedded[0] = 0
        both = (self._norm("enorm", embedded), self._norm("hnorm", hidden))
        x = F.linear(torch.cat(both, dim=-1), self.weights["eh_proj"])[None]
        positions, size = torch.arange(len(behind))[None], len(behind)
        out = self.block(
            x,
            attention_mask=torch.full((size, size), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        return self._norm("shared_head.norm", out[0])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.model.config.rms_norm_eps)


@torch.no_grad()
def save_with_mtp(
    path: Path, model: Any, *, noise: float, volume: float, spread: float = 0.1
) -> MTPReference:
    """Write the checkpoint; the last layer of `model` is taken out of it. The less of either, the
    more drafts are right: `noise` of what is added to the projection that passes the next token's
    embedding on, `volume` of what layers add to it, `spread` of the norms' weights."""
    for name, parameter in model.named_parameters():
        if name.endswith(QUIET):
            parameter *= volume
    model.model.embed_tokens.weight *= EMBEDDED / model.config.initializer_range
    model.save_pretrained(path)
    hidden, config = model.config.hidden_size, json.loads((path / "config.json").read_text())
    layers = model.model.layers
    block, model.model.layers = layers[-1], layers[:-1]
    model.config.num_hidden_layers = config["num_hidden_layers"] = number = len(layers) - 1
    config["num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    weights = {
        "enorm": 1 + spread * torch.randn(hidden),
        "hnorm": 1 + spread * torch.randn(hidden),
        "eh_proj": EMBEDDED * torch.eye(hidden, 2 * hidden)
        + noise * torch.randn(hidden, 2 * hidden),
        "shared_head.norm": 1 + spread * torch.randn(hidden),
        "embed_tokens": model.model.embed_tokens.weight.clone(),
        "shared_head.head": model.lm_head.weight.clone(),
    }
    file = path / "model.safetensors"
    named = {f"model.layers.{number}.{name}.weight": each for name, each in weights.items()}
    save_file({**load_file(file), **named}, file, metadata={"format": "pt"})
    return MTPReference(model, block, weights)
