"""Prices from a dated file in which every price names its source."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, ValidationError, model_validator

import infra
from penstock_planning.entry import Entry, to_configuration_error
from shared.errors import ConfigurationError

PRICES_FILE = Path(infra.__file__).parent / "terraform" / "prices.yaml"
ANYWHERE = "any"


class Source(Entry):
    """The source of the prices."""

    url: str = Field(pattern=r"^https?://.+")
    seen: datetime.date
    """The day on which the prices were looked up."""
    dated: datetime.date | None = None
    """The date given on the page or in the file. None if there isn't one."""
    note: str = ""


class Step(Entry):
    """A price that applies from the end of the previous step up to an amount.

    Without `up_to`, it applies to everything above the previous step.
    """

    up_to: float | None = Field(None, gt=0)
    usd: float = Field(ge=0)


Usd = dict[str, float | tuple[Step, ...]]
"""Prices, keyed by region or location. `any` applies to all other regions or locations."""


class EarlierPrice(Entry):
    """A unit's price from a given day (UTC) until the next price."""

    since: datetime.date
    usd: Usd = Field(min_length=1)


class ListPrice(Entry):
    """A unit's price."""

    unit: str
    source: str
    usd: Usd = Field(min_length=1)
    free: float = Field(0.0, ge=0)
    """Free units per month."""
    since: datetime.date | None = None
    """The day (UTC) from which the price applies. Required if there are earlier prices."""
    earlier: tuple[EarlierPrice, ...] = ()
    """Earlier prices, oldest first. Used by reports on past months, not by plans."""

    @model_validator(mode="after")
    def _earlier_prices_are_in_order(self) -> Self:
        days = [price.since for price in self.earlier]
        if days and (self.since is None or [*days, self.since] != sorted({*days, self.since})):
            raise ValueError("since: dates must increase from the earlier prices to this one")
        return self

    @model_validator(mode="after")
    def _steps_go_up_and_have_an_end(self) -> Self:
        for steps in self.usd.values():
            if isinstance(steps, tuple):
                ends = [step.up_to for step in steps]
                bounds = [end for end in ends[:-1] if end is not None]
                if (
                    not ends
                    or ends[-1] is not None
                    or len(bounds) < len(ends) - 1
                    or bounds != sorted(set(bounds))
                ):
                    raise ValueError("steps must increase, and only the last one may omit up_to")
        return self

    def history(self) -> list[tuple[datetime.date, Usd]]:
        """Returns all prices along with the day each takes effect, oldest first."""
        older = [(price.since, price.usd) for price in self.earlier]
        return [*older, (self.since or datetime.date.min, self.usd)]

    def cost_usd(self, place: str, amount: float, before: float = 0.0) -> float | None:
        """Returns the monthly cost of `amount` units in a location, on top of `before` units.

        Returns None if there is no price.
        """
        steps = self.usd.get(place, self.usd.get(ANYWHERE))
        if steps is None:
            return None
        if not isinstance(steps, tuple):
            steps = (Step(usd=steps),)
        first, last = max(0.0, before - self.free), max(0.0, before + amount - self.free)
        return _cost_up_to(last, steps) - _cost_up_to(first, steps)


def _cost_up_to(amount: float, steps: tuple[Step, ...]) -> float:
    cost, below = 0.0, 0.0
    for step in steps:
        end = amount if step.up_to is None else min(amount, step.up_to)
        cost += max(0.0, end - below) * step.usd
        below = max(below, end)
    return cost


class Prices(Entry):
    """All prices, in US dollars before tax, discounts, and commitments."""

    sources: dict[str, Source]
    prices: dict[str, ListPrice]

    @model_validator(mode="after")
    def _sources_are_named(self) -> Self:
        for key, price in self.prices.items():
            if price.source not in self.sources:
                raise ValueError(f"prices.{key}.source: {price.source!r} is not listed in sources")
        return self


def read_prices(over: Path | None = None) -> Prices:
    """Returns the bundled prices.

    The file `over`, which has its own sources, overrides individual prices.

    Raises:
        ConfigurationError: a file can't be read, or a price is malformed or has no source.
    """
    prices = _read(PRICES_FILE)
    if over is None:
        return prices
    own = _read(over)
    # A price is replaced as a whole, because a mix of old and new steps would have no single date.
    renamed = {
        name: price.model_copy(update={"source": f"{over}: {price.source}"})
        for name, price in own.prices.items()
    }
    sources = {f"{over}: {name}": source for name, source in own.sources.items()}
    return Prices(sources=prices.sources | sources, prices=prices.prices | renamed)


def _read(path: Path) -> Prices:
    try:
        return Prices.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise to_configuration_error(error, str(path)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
