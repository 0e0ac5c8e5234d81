"""/docs works without internet access and does not run any third-party scripts."""

import re
from urllib.parse import urljoin

import pytest

from tests.api.harness import ApiUnderTest

pytestmark = pytest.mark.anyio


async def test_everything_the_page_needs_is_here(api: ApiUnderTest) -> None:
    page = await api.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    needed = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(needed) == 4
    for path in needed:
        where = urljoin(f"{api.url}/docs", path)
        assert where.startswith(api.url)
        found = await api.http.get(where)
        assert found.status_code == 200
        assert len(found.content) == int(found.headers["content-length"]) > 100
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|javascript:", page.text)


async def test_policy_lets_only_our_own_scripts_run(api: ApiUnderTest) -> None:
    header = (await api.http.get("/docs")).headers["content-security-policy"]
    policy = dict(part.strip().split(" ", 1) for part in header.split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in header
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"


@pytest.mark.parametrize(
    "path", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "swagger-ui-dist/../../app.py", ""]
)
async def test_only_its_folder_is_served(api: ApiUnderTest, path: str) -> None:
    response = await api.http.get(f"/docs/assets/{path}")
    assert response.status_code in (404, 405)
    assert "create_app" not in response.text


async def test_every_endpoint_is_in_one_described_group(api: ApiUnderTest) -> None:
    document = (await api.http.get("/openapi.json")).json()
    groups = {group["name"] for group in document["tags"] if group["description"]}
    used = set[str]()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert len(operation["tags"]) == 1, path
            used.update(operation["tags"])
    assert used == groups
