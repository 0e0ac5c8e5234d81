"""Trusted sources for the API's public address, which is used to build links in responses."""

from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from shared.settings import ApiSettings
from tests.api.harness import IMAGE_MODEL, running_api, settings_for
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
BODY = {"model": IMAGE_MODEL.name, "prompt": "a", "response_format": "url"}
BY_A_PROXY = {
    **bearer("k"),
    "x-forwarded-proto": "https",
    "x-forwarded-for": "203.0.113.7",
    "host": "api.example.com",
}


def keyed_settings(tmp_path: Path, **settings: object) -> ApiSettings:
    """Without keys, the API only accepts requests to this machine's names."""
    return settings_for(tmp_path, keys_url=keys_url(tmp_path, k="t"), **settings)


@pytest.mark.parametrize(
    ("trusted", "scheme"),
    [
        ("", "http"),
        ("10.0.0.0/8, ::1", "http"),
        ("127.0.0.1", "https"),
        ("10.0.0.1,127.0.0.0/8", "https"),
        ("*", "https"),
    ],
)
async def test_links_are_https_where_a_trusted_proxy_says_so(
    tmp_path: Path, trusted: str, scheme: str
) -> None:
    async with running_api(keyed_settings(tmp_path, trusted_proxies=trusted)) as api:
        response = await api.http.post("/v1/images/generations", json=BODY, headers=BY_A_PROXY)
        assert response.json()["data"][0]["url"].startswith(
            f"{scheme}://api.example.com/v1/objects/"
        )


async def test_host_is_not_taken_from_a_header_that_callers_can_write(tmp_path: Path) -> None:
    async with running_api(keyed_settings(tmp_path, trusted_proxies="*")) as api:
        headers = BY_A_PROXY | {
            "x-forwarded-host": "evil.example.com",
            "x-forwarded-proto": "javascript",
        }
        response = await api.http.post("/v1/images/generations", json=BODY, headers=headers)
        assert response.json()["data"][0]["url"].startswith("http://api.example.com/v1/objects/")


@pytest.mark.parametrize(
    "path", ["/v1/embeddings/", "/v1/predictions/", "/predictions/", "/docs/", "/v1/models/"]
)
async def test_nobody_is_sent_elsewhere(tmp_path: Path, path: str) -> None:
    async with running_api(settings_for(tmp_path)) as api:
        response = await api.http.post(path, json={}, headers=BY_A_PROXY)
        assert response.status_code == 404
        assert "location" not in response.headers


@pytest.mark.parametrize("trusted", ["proxy.example.com", "10.0.0.1/8", "10.0.0.1,*", "10.0.0.1,"])
def test_proxies_that_are_no_networks_are_refused(tmp_path: Path, trusted: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_TRUSTED_PROXIES"):
        keyed_settings(tmp_path, trusted_proxies=trusted)
