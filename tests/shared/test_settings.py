from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.errors import BadInput, ConfigurationError
from shared.reports.definitions import find_zone
from shared.settings import ApiSettings, ReportSettings, Settings, WorkerSettings, read_settings


def test_defaults_need_no_environment() -> None:
    settings = read_settings(ApiSettings)
    assert (settings.port, settings.pubsub_endpoint, settings.models_file) == (
        8080,
        "",
        Path("models.yaml"),
    )


def test_environment_is_above_defaults_and_overrides_above_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_REGION", "europe-west4")
    monkeypatch.setenv("PENSTOCK_PORT", "9000")
    settings = read_settings(ApiSettings, port=9001)
    assert (settings.region, settings.port) == ("europe-west4", 9001)


def test_pubsub_endpoint_is_also_read_as_googles_clients_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:1")
    assert read_settings(Settings).pubsub_endpoint == "127.0.0.1:1"
    monkeypatch.setenv("PENSTOCK_PUBSUB_ENDPOINT", "127.0.0.1:2")
    assert read_settings(Settings).pubsub_endpoint == "127.0.0.1:2"
    assert read_settings(Settings, pubsub_endpoint="127.0.0.1:3").pubsub_endpoint == "127.0.0.1:3"


def test_missing_variable_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^PENSTOCK_MODEL: Field required") as caught:
        read_settings(WorkerSettings)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PENSTOCK_PORT", "http"),
        ("PENSTOCK_PORT", "65536"),
        ("PENSTOCK_REPLY_SLOTS", "0"),
        ("PENSTOCK_LOG_LEVEL", "LOUD"),
        ("PENSTOCK_MEMORY_CACHE_BYTES", "-1"),
    ],
)
def test_wrong_value_is_refused_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"^{variable}: Input should be"):
        read_settings(ApiSettings)


@pytest.mark.parametrize("variable", ["PENSTOCK_REDIS_URL", "PENSTOCK_RECORDS_URL"])
@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", "redis://cache:port/0"])
def test_wrong_redis_url_is_refused_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, url: str
) -> None:
    monkeypatch.setenv(variable, url)
    with pytest.raises(ConfigurationError, match=f"^{variable}: "):
        read_settings(ApiSettings)


@pytest.mark.parametrize("zone", ["Factory", "localtime", "Europe/Nowhere", "../UTC", ""])
def test_billing_zone_is_one_that_reports_accept(zone: str) -> None:
    with pytest.raises(BadInput):
        find_zone(zone)
    with pytest.raises(ConfigurationError, match=r"^PENSTOCK_BILLING_TZ: must be a time zone"):
        read_settings(ReportSettings, billing_tz=zone)


def test_settings_are_frozen() -> None:
    settings = read_settings(Settings)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, "region", "elsewhere")  # noqa: B010


def test_records_lie_beside_the_cache_unless_they_have_a_redis_of_their_own() -> None:
    assert (
        read_settings(Settings, redis_url="redis://cache/0").records_redis_url == "redis://cache/0"
    )
    given = {"redis_url": "redis://cache/0", "records_url": "redis://records/0"}
    assert read_settings(Settings, **given).records_redis_url == "redis://records/0"
