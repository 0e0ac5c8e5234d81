"""Streams of requests, as a scenario describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0)]


class Entry(BaseModel):
    """A part of a scenario: nothing unknown, nothing infinite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Arrivals(Entry):
    """A stream of requests. The streams of a model add up."""

    spacing: Literal["poisson", "even"] = "poisson"
    from_s: Seconds = 0.0
    until_s: Seconds | None = None
    """None: the end of the scenario."""


class Constant(_Arrivals):
    """Arrivals at a constant rate."""

    kind: Literal["constant"] = "constant"
    per_s: float = Field(ge=0)


class Wave(_Arrivals):
    """A sine between two rates, with the least at the start. A day has 86400 s."""

    kind: Literal["wave"]
    least_per_s: float = Field(ge=0)
    most_per_s: float = Field(gt=0)
    period_s: float = Field(86400.0, gt=0)


class StepArrivals(_Arrivals):
    """One rate, and another one from a moment on."""

    kind: Literal["step"]
    before_per_s: float = Field(ge=0)
    after_per_s: float = Field(ge=0)
    at_s: Seconds


class Burst(_Arrivals):
    """One rate, and more for a while."""

    kind: Literal["burst"]
    base_per_s: float = Field(0.0, ge=0)
    burst_per_s: float = Field(gt=0)
    at_s: Seconds
    for_s: float = Field(gt=0)


class Trace(_Arrivals):
    """Requests at recorded times: a trace of `penstock load`, of which only `at_s` counts."""

    kind: Literal["trace"]
    file: Path
    """Relative to the scenario's file."""


Arrivals = Annotated[Constant | Wave | StepArrivals | Burst | Trace, Field(discriminator="kind")]
