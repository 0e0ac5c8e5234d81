"""A replay's plan: arrivals of a day or a trace, for the target's models and tenants."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock_load.day import NUMBERS, Day, DayModel, arrivals_of
from penstock_load.inputs import RequestForm, can_be_made_up, form_of, input_of
from penstock_load.target import ServedModel, Target
from penstock_load.trace import Arrival, read_trace
from shared.errors import BadInput, ConfigurationError


class LoadPlan(NamedTuple):
    """The arrivals to send, and the request form for each model."""

    arrivals: Sequence[Arrival]
    forms: Mapping[str, RequestForm]


class DayOptions(NamedTuple):
    """Command-line options for a day."""

    requests: int
    tenants: int
    models: tuple[str, ...]
    """`NAME` or `NAME=SHARE`. Empty means all served models whose inputs can be generated."""
    seed: int
    numbers: Mapping[str, float]


def run_id(now: datetime | None = None) -> str:
    """Returns a new name for a replay, used as the prefix of all its request IDs."""
    moment = now or datetime.now(UTC)
    return f"load-{moment:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def plan_day(target: Target, options: DayOptions) -> LoadPlan:
    """Plans the arrivals of a day.

    Raises:
        BadInput: a model is not served, or a number is invalid. Unavailable: the target's models
            can't be listed.
    """
    served = target.models()
    shares = _shares(options.models, served)
    forms = {name: form_of(name, _tasks(served)) for name in shares}
    if runs := [name for name, form in forms.items() if form.is_run]:
        raise BadInput(
            f"model: {runs[0]} requires custom inputs, which a day does not contain; use a trace",
            field="model",
        )
    if target.keys and options.tenants > len(target.keys):
        raise BadInput(
            f"tenants: {options.tenants} tenants need {options.tenants} keys, but there are only "
            f"{len(target.keys)}",
            field="tenants",
        )
    known = list(target.keys) or [f"tenant-{place + 1}" for place in range(options.tenants)]
    day = Day(
        requests=options.requests,
        tenants=known[: options.tenants],
        models={
            name: DayModel(
                share=share or forms[name].share,
                sizes=forms[name].sizes,
                items=forms[name].items,
            )
            for name, share in shares.items()
        },
        seed=options.seed,
        **_numbers(options.numbers),
    )
    return LoadPlan(arrivals_of(day), forms)


def plan_trace(target: Target, path: Path, requests: int = 0) -> LoadPlan:
    """Plans the arrivals of a trace.

    Args:
        target: serves the trace's models, and has keys for its tenants.
        requests: send only the first N. 0 means all of them.

    Raises:
        ConfigurationError: the trace can't be read, or names a tenant without a key.
        BadInput: a model is not served, its task can't be replayed, or an input is not valid for a
            prediction.
        Unavailable: the target's models can't be listed.
    """
    arrivals = read_trace(path)[: requests or None]
    served = target.models()
    usual = next((model.id for model in served.values() if can_be_made_up(model.task)), "")
    if target.keys and (unknown := {arrival.tenant for arrival in arrivals} - target.keys.keys()):
        raise ConfigurationError(f"{path}: no key for tenant {min(unknown)!r}", field="keys")
    names = {arrival.model for arrival in arrivals}
    # Rows contain model names, so the ledger has no aliases.
    named = {name: served[name or usual].id for name in names if (name or usual) in served}
    forms = {
        named.get(name, name): form_of(name or usual, _tasks(served)) for name in sorted(names)
    }
    arrivals = [
        msgspec.structs.replace(arrival, model=named[arrival.model]) for arrival in arrivals
    ]
    for arrival in arrivals:
        if forms[arrival.model].is_run:
            input_of(arrival)
    return LoadPlan(arrivals, forms)


def _tasks(served: Mapping[str, ServedModel]) -> dict[str, str]:
    return {name: model.task for name, model in served.items()}


def _shares(models: Sequence[str], served: Mapping[str, ServedModel]) -> dict[str, float | None]:
    """Returns the day's models with their shares. None means the task's default share."""
    if not models:
        replayed = {model.id: None for model in served.values() if can_be_made_up(model.task)}
        if not replayed:
            raise BadInput("model: none of the served models can be replayed", field="model")
        return dict(replayed)
    shares: dict[str, float | None] = {}
    for pair in models:
        name, sign, text = pair.partition("=")
        try:
            share = float(text) if sign else None
        except ValueError:
            share = -1.0
        if share is not None and not 0 < share < float("inf"):
            raise BadInput(f"model must be NAME or NAME=SHARE, got {pair!r}", field="model")
        shares[served[name].id if name in served else name] = share
    return shares


def _numbers(numbers: Mapping[str, float]) -> dict[str, Any]:
    if unknown := numbers.keys() - NUMBERS.keys():
        raise BadInput(
            f"set: a day has no {min(unknown)[:80]!r}; available: {', '.join(NUMBERS)}",
            field="set",
        )
    return {
        name: int(value) if name == "bursts" and isfinite(value) else value
        for name, value in numbers.items()
    }
