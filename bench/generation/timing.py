"""Token arrival times: time to the first token, and time between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.report import Figure


@dataclass
class TimedGeneration:
    """One text: when it was requested, when its pieces arrived (monotonic), and its tokens."""

    asked_s: float
    pieces_s: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.pieces_s[0] - self.asked_s

    @property
    def between_s(self) -> float:
        """Seconds from one token to the next, averaged over the text."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / max(1, self.tokens - 1)


def tokens_per_s(texts: Sequence[TimedGeneration]) -> float:
    wall_s = max(text.pieces_s[-1] for text in texts) - min(text.asked_s for text in texts)
    return sum(text.tokens for text in texts) / wall_s


def figures_of(name: str, texts: Sequence[TimedGeneration]) -> list[Figure]:
    """Returns tokens per second, and percentiles of both times."""
    figures = [Figure(f"{name}, speed", tokens_per_s(texts), "tokens/s")]
    for label, values_s in (
        ("first token", [text.first_s for text in texts]),
        ("between tokens", [text.between_s for text in texts if text.tokens > 1]),
    ):
        for percent in (50, 99):
            value_ms = 1000 * float(np.percentile(values_s, percent))
            figures.append(Figure(f"{name}, {label} p{percent}", value_ms, "ms"))
    return figures
