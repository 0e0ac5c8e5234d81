"""Price changes: every process charges a request at the prices in force when it arrived."""

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.errors import ConfigurationError
from shared.messages import (
    Envelope,
    Item,
    ItemOutcome,
    Job,
    JobBody,
    Receipt,
    decode_job,
    encode_job,
)
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.entry import Batch, Price, PriceChange
from shared.models.tasks.embedding import TextInput
from shared.money.charge import ItemPrice, charge_of, count_work, price_of
from shared.usage.row import Row, row_of

CHANGED_AT = dt.datetime(2026, 11, 15, tzinfo=dt.UTC)
CHANGED_AT_S = CHANGED_AT.timestamp()
CATALOG = """\
models:
  - name: mini
    task: embedding
    source: local:mini
    dimensions: 4
    batch: {max_tokens: 64}
    price:
      per_million_tokens_usd: 1.0
      changes:
        - {starts_at: 2026-11-15T00:00:00Z, per_million_tokens_usd: 2.0, cached_share: 0.5}
        - {starts_at: 2026-12-01T00:00:00+01:00, version: "2026-12", per_million_tokens_usd: 3.0}
"""
MODEL = Model(
    name="mini",
    task="embedding",
    source="local:x",
    dimensions=1,
    batch=Batch(max_tokens=64, max_items=8),
    price=Price(
        per_million_tokens_usd=1.0,
        changes=(
            PriceChange(
                starts_at=CHANGED_AT, version="2", per_million_tokens_usd=2.0, cached_share=0.5
            ),
        ),
    ),
)


def row_at(received_at_s: float, cache: str = "miss", status: str = "succeeded") -> Row:
    """The row for a million tokens, from a job that was sent over the wire."""
    sent = Envelope(
        request_id="r",
        part=0,
        model="mini",
        tenant="t",
        deadline_s=received_at_s + 60,
        received_at_s=received_at_s,
        published_at_s=received_at_s,
    )
    data, attributes = encode_job(Job(sent, JobBody([Item(0, TextInput("a"))])))
    envelope = decode_job(data, attributes).envelope
    tokens = 1_000_000 if status == "succeeded" else None
    return row_of(envelope, ItemOutcome(0, status, Receipt(cache, tokens=tokens)), MODEL)


def test_a_price_change_is_right_on_both_sides() -> None:
    before, after = row_at(CHANGED_AT_S - 0.001), row_at(CHANGED_AT_S)
    assert (before.cost_usd, before.list_price_usd) == (1.0, 1.0)
    assert (after.cost_usd, after.list_price_usd, after.price_version) == (2.0, 2.0, "2")
    assert before.price_version == MODEL.price.name != after.price_version


@pytest.mark.parametrize(
    ("cache", "status", "cost_usd", "listed_usd"),
    [
        ("miss", "succeeded", 2.0, 2.0),
        ("memory", "succeeded", 1.0, 2.0),
        ("joined", "succeeded", 1.0, 2.0),
        ("none", "failed", 0.0, 0.0),
        ("miss", "canceled", 0.0, 0.0),
        ("miss", "expired", 0.0, 0.0),
    ],
)
def test_rules_of_charging_hold_after_a_change(
    cache: str, status: str, cost_usd: float, listed_usd: float
) -> None:
    row = row_at(CHANGED_AT_S + 1, cache, status)
    assert (row.cost_usd, row.list_price_usd) == (cost_usd, listed_usd)
    assert row.price_version == "2"


@given(st.floats(0, 4e9), st.floats(0, 1))
def test_answer_and_row_agree_at_any_time(at_s: float, price_share: float) -> None:
    outcome = ItemOutcome(0, "succeeded", Receipt("miss", tokens=12_345))
    envelope = Envelope(
        request_id="r",
        part=0,
        model="mini",
        tenant="t",
        deadline_s=at_s,
        received_at_s=at_s,
        published_at_s=at_s,
        price_share=price_share,
    )
    row, price = row_of(envelope, outcome, MODEL), price_of(MODEL, at_s, price_share)
    assert row.price_version == price.version
    assert row.list_price_usd is not None
    assert row.charged_share is not None
    assert row.cost_usd == row.charged_share * row.list_price_usd


def test_the_catalog_reads_changes_in_their_zones(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(CATALOG)
    price = read_catalog(file).find("mini").price
    last_s = dt.datetime(2026, 11, 30, 23, tzinfo=dt.UTC).timestamp()
    per_token = [
        price.terms_at(at_s).per_million_tokens_usd
        for at_s in (0, CHANGED_AT_S - 1, CHANGED_AT_S, last_s - 1, last_s)
    ]
    assert per_token == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert price.terms_at(last_s).name == "2026-12"


@pytest.mark.parametrize(
    ("wrong", "right", "reason"),
    [
        ("2026-12-01T00:00:00+01:00", "2026-11-01T00:00:00Z", "each starts_at must be later"),
        ("2026-12-01T00:00:00+01:00", "2026-12-01T00:00:00", "starts_at"),
        ("2026-12-01T00:00:00+01:00", "soon", "starts_at"),
        (
            'version: "2026-12", per_million_tokens_usd: 3.0',
            "per_million_tokens_usd: 1.0",
            "different version",
        ),
        ('version: "2026-12"', "version: 2026", "must be quoted"),
    ],
)
def test_wrong_changes_are_refused_by_name(
    tmp_path: Path, wrong: str, right: str, reason: str
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(CATALOG.replace(wrong, right))
    with pytest.raises(ConfigurationError) as caught:
        read_catalog(file)
    assert "price" in caught.value.message
    assert reason in caught.value.message


def test_other_figures_have_another_version() -> None:
    names = {
        Price(per_million_tokens_usd=tokens, cached_share=share).name
        for tokens in (0.0, 0.01, 0.010000000000000002)
        for share in (0.0, 0.2)
    }
    assert len(names) == 6
    with pytest.raises(ValidationError):
        Price(version="two words")


@pytest.mark.parametrize(
    ("output_usd", "cached_usd", "expected_micro_usd"),
    [(None, None, 100 * 2), (6.0, None, 70 * 2 + 30 * 6), (6.0, 0.5, 60 * 2 + 30 * 6 + 10 * 0.5)],
)
def test_tokens_that_are_written_or_cached_have_prices_of_their_own(
    output_usd: float | None, cached_usd: float | None, expected_micro_usd: float
) -> None:
    price = ItemPrice(
        per_million_tokens_usd=2.0,
        per_million_output_tokens_usd=output_usd,
        per_million_cached_tokens_usd=cached_usd,
    )
    receipt = Receipt(tokens=100, output_tokens=30, cached_tokens=10)
    listed_usd = charge_of(price, ItemOutcome(0, "succeeded", receipt)).list_price_usd
    assert listed_usd == pytest.approx(expected_micro_usd / 1e6)


@pytest.mark.parametrize(
    ("status", "in_part", "cache", "cost_usd"),
    [
        ("canceled", True, "none", 3.0),
        ("expired", True, "miss", 3.0),
        ("canceled", True, "joined", 1.5),
        ("failed", True, "miss", 0.0),
        ("canceled", False, "miss", 0.0),
        ("expired", False, "miss", 0.0),
    ],
)
def test_tokens_that_were_read_of_a_text_without_a_result_are_charged(
    status: str, in_part: bool, cache: str, cost_usd: float
) -> None:
    price = ItemPrice(
        per_million_tokens_usd=1.0, per_million_output_tokens_usd=4.0, cached_share=0.5
    )
    receipt = Receipt(cache, tokens=1_500_000, output_tokens=500_000, is_delivered_in_part=in_part)
    outcome = ItemOutcome(0, status, receipt)
    assert charge_of(price, outcome).cost_usd == cost_usd
    assert bool(count_work(price, outcome)) == bool(cost_usd)
