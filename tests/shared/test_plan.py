"""Plans in a file or set by an administrator."""

import msgspec
import pytest

from shared.tenants.plan import DEFAULT_PLAN, Caller, Limits, Plan


def test_plan_without_limits_counts_nothing() -> None:
    assert DEFAULT_PLAN.are_none
    assert Plan(weight=4.0, max_priority="batch", batch_price_share=0.1).are_none
    assert Caller().key_limits is None


@pytest.mark.parametrize(
    "given",
    [
        {"requests_per_min": 1},
        {"tokens_per_min": 1},
        {"pixel_steps_per_min": 1},
        {"max_in_flight": 1},
        {"budget_usd_per_month": 0},
    ],
)
def test_each_limit_counts(given: dict[str, float]) -> None:
    assert not msgspec.convert(given, Plan).are_none
    assert not msgspec.convert(given, Limits).are_none


def test_rates_of_one_model_count() -> None:
    assert not msgspec.convert({"per_model": {"mini": {"requests_per_min": 1}}}, Plan).are_none


@pytest.mark.parametrize(
    "given",
    [
        {"requests_per_min": 0},
        {"budget_usd_per_month": -1},
        {"budget_usd_per_month": 1e10},
        {"warn_at_shares": [0]},
        {"warn_at_shares": [0.5] * 9},
        {"max_priority": "urgent"},
        {"on_limit_store_outage": "open"},
        {"per_model": {"mini": {"max_in_flight": 1}}},
        {"requests_per_minute": 1},
        {"budget_webhook": "x" * 2049},
    ],
)
def test_wrong_plans_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, Plan)
