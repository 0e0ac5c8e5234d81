"""The budgets that apply to a batch: the current ones, as far as they are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.batch_runner import terms
from api.batch_runner.terms import CurrentTerms
from api.batches.documents import BatchCreated
from shared.stores.key_stores import key_store
from shared.tenants.directory import StoredKey
from shared.tenants.plan import Limits, Plan
from tests.keys import keys_url, stored

pytestmark = pytest.mark.anyio
KEY = stored("a", "acme").id
BATCH = BatchCreated(
    id="batch_1",
    tenant="acme",
    endpoint="/v1/embeddings",
    input_file_id="file-1",
    created_at_s=1.0,
    expires_at_s=2.0,
    output_keep_s=3600,
    key_id=KEY,
    plan=Plan(budget_usd_per_month=1.0, requests_per_min=5),
    plan_name="first",
    key_limits=Limits(budget_usd_per_month=0.5, tokens_per_min=5),
)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "REFRESH_S", 0.0)


def _directory(folder: Path, plan_usd: float, *keys: StoredKey) -> str:
    plans = {"now": Plan(budget_usd_per_month=plan_usd, requests_per_min=7)}
    return keys_url(folder, plans=plans, tenants={"acme": "now"}, keys=keys)


async def _budgets(current: CurrentTerms) -> tuple[str, float | None, float | None]:
    caller = await current.caller_of(BATCH)
    assert (caller.tenant, caller.key_id, caller.plan.requests_per_min) == ("acme", KEY, None)
    limits = caller.key_limits
    assert limits is None or limits.tokens_per_min is None, "rates are for requests only"
    key_usd = None if limits is None else limits.budget_usd_per_month
    return caller.plan_name, caller.plan.budget_usd_per_month, key_usd


async def test_budgets_are_those_of_now(tmp_path: Path) -> None:
    url = _directory(tmp_path, 2.0, stored("a", "acme", limits=Limits(budget_usd_per_month=0.7)))
    async with CurrentTerms(key_store(url)) as current:
        assert await _budgets(current) == ("now", 2.0, 0.7)
        _directory(tmp_path, 3.0, stored("a", "acme"))
        assert await _budgets(current) == ("now", 3.0, None)
        _directory(tmp_path, 4.0)
        assert await _budgets(current) == ("now", 4.0, 0.5), "the key is gone"


async def test_what_can_not_be_read_changes_nothing(tmp_path: Path) -> None:
    url = _directory(tmp_path, 2.0)
    async with CurrentTerms(key_store(url)) as current:
        assert await _budgets(current) == ("now", 2.0, 0.5)
        (tmp_path / "keys.json").write_text("{")
        assert await _budgets(current) == ("now", 2.0, 0.5)
        (tmp_path / "keys.json").unlink()
        assert await _budgets(current) == ("now", 2.0, 0.5)


async def test_without_a_directory_the_budgets_of_the_creation_count(tmp_path: Path) -> None:
    for store in (None, key_store((tmp_path / "none.json").as_uri())):
        async with CurrentTerms(store) as current:
            assert await _budgets(current) == ("first", 1.0, 0.5)


async def test_directory_is_read_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "REFRESH_S", 2.0)
    now_s = [0.0]
    url = _directory(tmp_path, 2.0)
    async with CurrentTerms(key_store(url), clock=lambda: now_s[0]) as current:
        assert await _budgets(current) == ("now", 2.0, 0.5)
        _directory(tmp_path, 3.0)
        assert await _budgets(current) == ("now", 2.0, 0.5)
        now_s[0] = 2.0
        assert await _budgets(current) == ("now", 3.0, 0.5)
