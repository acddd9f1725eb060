"""What compiling a forward found out, for people and for `compile.explain`; no start reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

REPORT = "report.json"
DYNAMO_GRAPH = "dynamo_graph.py"
"""Layer 1: the forward as one graph, as it was traced."""
COMPUTATION_GRAPH = "computation_graph.py"
"""Layer 2: the same graph, split into pieces."""
TRANSFORMED_CODE = "transformed_code.py"
"""Layer 4: the function that runs the pieces. Layer 3 is the code in their artifacts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PieceReport:
    name: str
    id: int
    is_splitting: bool
    """It runs eagerly between compiled pieces."""
    num_nodes: int
    key: str = ""
    """What a compiled piece computes; equal pieces share one. Empty for a splitting piece."""


@dataclass(frozen=True)
class CompileReport:
    """What happened when a forward was compiled. Invariant: plain data, the same after JSON."""

    prefix: str
    traced_files: tuple[str, ...] = ()
    graph_breaks: tuple[str, ...] = ()
    """What was found in place of one graph, with its place and a remedy: tracing ends at the first,
    and nothing is compiled."""
    guards_kept: tuple[str, ...] = ()
    guards_dropped: tuple[str, ...] = ()
    """Conditions that later calls do not check."""
    pieces: tuple[PieceReport, ...] = ()
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase by name, such as dynamo, split, compile and load."""
    misses: tuple[str, ...] = ()
    """Why something was compiled although there is a cache."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CompileReport:
        """Read a report; ValueError: it is none."""
        try:
            data = json.loads(text)
            pieces = tuple(PieceReport(**piece) for piece in data.pop("pieces"))
            lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
            return cls(**{**data, **lists}, pieces=pieces)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"report: wanted the fields of a report, found {error!r}") from error

    def log(self) -> None:
        """Log what was compiled and how long each phase took, in one line."""
        compiled = [piece for piece in self.pieces if not piece.is_splitting]
        unique = len({piece.key for piece in compiled})
        phases = ", ".join(f"{name} {took:.2f} s" for name, took in self.timings_s.items())
        logger.info(
            "torch.compile of %s took %.2f s (%s): %d pieces, %d compiled, %d of them different",
            self.prefix,
            sum(self.timings_s.values()),
            phases,
            len(self.pieces),
            len(compiled),
            unique,
        )
