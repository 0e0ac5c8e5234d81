"""Rules for plans and keys that go beyond their format.

A plan or key that breaks them could never work.

A directory that is already stored is read without applying these rules, because the catalog may
have changed. The rules apply to every change, and to a file when the API starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from shared.errors import BadInput
from shared.tenants.api_key import ID_LENGTH, PREFIX, holds_key
from shared.tenants.directory import Document, Mistake, StoredKey
from shared.tenants.plan import Limits, Plan, Rates

MAX_COUNT = 2**53
"""Redis counts in doubles, which are exact only up to this number."""
MAX_TIME_S = 253_402_300_799
"""The end of the year 9999, as Unix time. Later times are probably in milliseconds."""
MAX_NAMED = 20
"""Maximum number of models named in an error."""
_RATES_OF_WORK = tuple(name for name in Rates.__struct_fields__ if name != "requests_per_min")
IS_A_KEY = "looks like an API key, which must not be stored"
NOT_AN_ID = (
    f"must be only the key's ID, the {ID_LENGTH} characters after {PREFIX!r}, not the whole key"
)


class Served(NamedTuple):
    """Names that plans and keys may use (`shared.stores.key_stores.list_served_names`)."""

    units: Mapping[str, str]
    """Each model's unit of work, keyed by catalog name."""
    aliases: Mapping[str, str]
    """Model names, keyed by alias."""
    check_webhook: Callable[[str], object]
    """Raises BadInput for a URL that webhooks would not be delivered to."""


def document_mistakes(document: Document, served: Served | None, now_s: float) -> Iterator[Mistake]:
    """Yields everything that can't work in a well-formed directory.

    Revoked and expired keys are skipped.

    Args:
        served: available names. If None, they are unknown, so models and webhooks are not checked.
    """
    for name, plan in document.plans.items():
        yield from (mistake.below("plans", name) for mistake in plan_mistakes(plan, served))
    for tenant in document.tenants:
        if holds_key(tenant):
            yield Mistake(("tenants",), f"the tenant name {IS_A_KEY}")
    for number, key in enumerate(document.keys):
        if key.revoked_s is None and (key.expires_s is None or key.expires_s > now_s):
            yield from (mistake.below("keys", number) for mistake in key_mistakes(key, served))


def plan_mistakes(plan: Plan, served: Served | None) -> Iterator[Mistake]:
    """Yields the parts of a plan that can't work."""
    yield from _count_mistakes(plan)
    if holds_key(plan.budget_webhook):
        yield Mistake(("budget_webhook",), IS_A_KEY)
    elif plan.budget_webhook and served is not None:
        try:
            served.check_webhook(plan.budget_webhook)
        except BadInput as error:
            yield Mistake(("budget_webhook",), error.message)
    for model, rates in plan.per_model.items():
        if holds_key(model):
            yield Mistake(("per_model",), f"the model name {IS_A_KEY}")
            continue
        below = ("per_model", model)
        yield from (mistake.below(*below) for mistake in _count_mistakes(rates))
        if served is not None:
            yield from (mistake.below(*below) for mistake in _model_mistakes(model, served, rates))


def key_mistakes(key: StoredKey, served: Served | None) -> Iterator[Mistake]:
    """Yields the parts of a key that can't work."""
    for field, text in (("tenant", key.tenant), ("name", key.name)):
        if holds_key(text):
            yield Mistake((field,), IS_A_KEY)
    if not key.name.isprintable():
        yield Mistake(("name",), "must not contain unprintable characters")
    if not key.scopes:
        yield Mistake(("scopes",), "must not be empty; list at least one, or omit it for all")
    if key.expires_s is not None and key.expires_s > MAX_TIME_S:
        yield Mistake(("expires_s",), "must be before the year 10000; it is in seconds")
    if key.limits is not None:
        yield from (mistake.below("limits") for mistake in _count_mistakes(key.limits))
    if key.models is not None:
        yield from (mistake.below("models") for mistake in _models_mistakes(key.models, served))


def _models_mistakes(models: tuple[str, ...], served: Served | None) -> Iterator[Mistake]:
    if not models:
        yield Mistake((), "must not be empty; list at least one, or omit it for all")
    for number, model in enumerate(models):
        if holds_key(model):
            yield Mistake((number,), IS_A_KEY)
        elif served is not None:
            yield from (mistake.below(number) for mistake in _model_mistakes(model, served))


def _model_mistakes(name: str, served: Served, rates: Rates | None = None) -> Iterator[Mistake]:
    if name in served.aliases:
        right = served.aliases[name]
        yield Mistake((), f"{name!r} is an alias; use the model's name, {right!r}")
    elif name not in served.units:
        known = ", ".join(sorted(served.units)[:MAX_NAMED])
        yield Mistake((), f"model {name[:80]!r} is not in the catalog, which contains {known}")
    elif rates is not None:
        unit = served.units[name]
        for field in _RATES_OF_WORK:
            if field != f"{unit}_per_min" and getattr(rates, field) is not None:
                reason = f"{name} is measured in {unit}, so use {unit}_per_min"
                yield Mistake((field,), reason)


def _count_mistakes(rates: Rates) -> Iterator[Mistake]:
    fields = [*Rates.__struct_fields__]
    if isinstance(rates, Limits):
        fields.append("max_in_flight")
    for field in fields:
        if (getattr(rates, field) or 0) > MAX_COUNT:
            yield Mistake((field,), f"must be at most {MAX_COUNT}; omit it for no limit")
