"""A plan contains only requests that the target can serve; errors name the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock_load.plan import DayOptions, LoadPlan, plan_day, plan_trace
from penstock_load.target import Target, read_keys
from shared.errors import BadInput, ConfigurationError, PenstockError, Unavailable
from tools.load.tests.api_of_load import serving

OPTIONS = DayOptions(100, 3, (), 0, {})


async def asked(made: Callable[[Target], LoadPlan], keys: dict[str, str] | None = None) -> LoadPlan:
    async with serving() as api:
        return await asyncio.to_thread(lambda: made(Target(api.url, keys=keys)))


@pytest.mark.anyio
async def test_day_has_all_models_that_can_be_replayed() -> None:
    plan = await asked(lambda target: plan_day(target, OPTIONS))
    assert set(plan.forms) == {"mini", "tiny"}
    assert len(plan.arrivals) == 100
    assert sum(arrival.model == "tiny" for arrival in plan.arrivals) == 1
    assert {arrival.tenant for arrival in plan.arrivals} == {"tenant-1", "tenant-2", "tenant-3"}


@pytest.mark.anyio
async def test_day_has_the_models_shares_and_tenants_that_are_named() -> None:
    options = OPTIONS._replace(models=("text-embedding-ada-002=3", "tiny=1"), tenants=1)
    keys = {"acme": "a", "zenith": "z"}
    plan = await asked(lambda target: plan_day(target, options), keys)
    assert sum(arrival.model == "mini" for arrival in plan.arrivals) == 75
    assert {arrival.tenant for arrival in plan.arrivals} == {"acme"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"models": ("huge",)}, "model: 'huge' is not served there; available models: mini, "),
        ({"models": ("pairs",)}, "model: pairs has task similarity, which can't be replayed"),
        ({"models": ("spell",)}, "model: spell requires custom inputs"),
        ({"models": ("mini=x",)}, "model must be NAME or NAME=SHARE, got 'mini=x'"),
        ({"models": ("mini=-1",)}, "model must be NAME or NAME=SHARE, got 'mini=-1'"),
        ({"tenants": 5}, "tenants: 5 tenants need 5 keys, but there are only 1"),
        ({"numbers": {"speed": 1.0}}, "set: a day has no 'speed'; available: zipf, "),
        ({"numbers": {"repeat_share": 2.0}}, "repeat_share must be from 0 to 1, got 2.0"),
        ({"numbers": {"swing": 1.5}}, "swing must be from 0 to 1, got 1.5"),
        ({"numbers": {"zipf": -1.0}}, "zipf must be from 0 to 10"),
        ({"numbers": {"bursts": -1.0}}, "bursts must be from 0 to 10000"),
        ({"numbers": {"cancel_within_s": float("nan")}}, "cancel_within_s must be from"),
    ],
)
async def test_wrong_days_are_refused_by_name(changed: dict[str, Any], reason: str) -> None:
    options = OPTIONS._replace(tenants=1)._replace(**changed)
    with pytest.raises(BadInput) as caught:
        await asked(lambda target: plan_day(target, options), {"acme": "a"})
    assert caught.value.message.startswith(reason)


@pytest.mark.anyio
async def test_trace_gets_names_for_aliases_and_a_usual_model(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at_s,model\n0,text-embedding-ada-002\n1,\n2,tiny\n3,tiny\n")
    plan = await asked(lambda target: plan_trace(target, path, 3))
    assert [arrival.model for arrival in plan.arrivals] == ["mini", "mini", "tiny"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("at_s,tenant\n0,nobody\n", "no key for tenant 'nobody'"),
        ("at_s,tenant,model\n0,acme,huge\n", "model: 'huge' is not served there"),
        ("at_s,tenant,model\n0,acme,pairs\n", "model: pairs has task similarity"),
        ("at_s,tenant,model,input\n0,acme,spell,a b\n", "input: spell requires a JSON object"),
        ("at_s,tenant,model\n0,acme,spell\n", "input: spell requires a JSON object"),
    ],
)
async def test_trace_that_does_not_fit_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(PenstockError) as caught:
        await asked(lambda target: plan_trace(target, path), {"acme": "a"})
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "ftp://here", "http://", "http://here:port", "http://[::1"]
)
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        Target(url)
    assert caught.value.field == "url"


def test_url_may_have_a_path_or_name_the_version() -> None:
    target = Target("https://example.com/penstock/v1/")
    assert (target.server.host, target.server.port, target.path) == (
        "example.com",
        443,
        "/penstock",
    )
    assert target.server.tls is not None
    assert target.host_header == "example.com"


def test_target_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9/v1/models"):
        Target("http://127.0.0.1:9").models()


@pytest.mark.parametrize("text", ["", "tenant\nacme\n", "tenant,key\nacme,\n", "tenant,key\n"])
def test_wrong_files_of_keys_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"keys: .*keys\.csv"):
        read_keys(path)


def test_files_of_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.csv"
    path.write_text("key,tenant\na,acme\nz,zenith\n")
    assert read_keys(path) == {"acme": "a", "zenith": "z"}
