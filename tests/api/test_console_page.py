"""/console is served entirely from this API, under a policy that allows nothing else."""

import re
from urllib.parse import urljoin

import pytest
from playwright.async_api import expect

from api.routes.pages import CONSOLE
from tests.api.harness import ApiUnderTest
from tests.browser import needs_chromium, opened_page

pytestmark = pytest.mark.anyio
FILES = sorted(path.relative_to(CONSOLE).as_posix() for path in CONSOLE.rglob("*.*"))
LINKED = re.compile(r'(?:src|href)="([^"#]+)"')
IMPORTED = re.compile(r'from "(\./[^"]+)"')


async def test_everything_the_page_needs_is_here(api: ApiUnderTest) -> None:
    asked, found = ["/console"], set[str]()
    while asked:
        path = asked.pop()
        response = await api.http.get(path)
        assert response.status_code == 200, path
        assert len(response.content) == int(response.headers["content-length"]) > 100
        found.add(path)
        pattern = {"/docs": None, "/console": LINKED}.get(path, IMPORTED)
        for one in pattern.finditer(response.text) if pattern else ():
            where = urljoin(f"{api.url}{path}", one[1])
            assert where.startswith(f"{api.url}/")
            if (needed := where.removeprefix(api.url)) not in found:
                asked.append(needed)
    served = {f"/console/assets/{file}" for file in FILES if file != "index.html"}
    assert found == {"/console", "/docs"} | served


@pytest.mark.parametrize("path", ["/console", *(f"/console/assets/{file}" for file in FILES)])
async def test_policy_lets_only_our_own_files_run(api: ApiUnderTest, path: str) -> None:
    for response in (await api.http.get(path), await api.http.head(path)):
        header = response.headers["content-security-policy"]
        policy = dict(part.strip().split(" ", 1) for part in header.split(";"))
        assert policy["default-src"] == "'self'"
        assert policy["img-src"] == "'self' data: blob:"
        assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"
        assert "unsafe" not in header
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
    assert not response.content


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith(("js", "html"))])
def test_no_markup_is_made_from_text(file: str) -> None:
    source = (CONSOLE / file).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source)
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=\"|javascript:", source)
    # Only tries that the user chooses to keep outlive the tab; a key never does.
    assert "localStorage" not in source or file == "js/history.js"
    assert "document.cookie" not in source


async def test_a_browser_with_the_newest_files_gets_none(api: ApiUnderTest) -> None:
    first = await api.http.get("/console/assets/js/app.js")
    again = await api.http.get(
        "/console/assets/js/app.js", headers={"if-none-match": first.headers["etag"]}
    )
    assert again.status_code == 304


@pytest.mark.parametrize("path", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "js/../../app.py"])
async def test_only_its_folder_is_served(api: ApiUnderTest, path: str) -> None:
    response = await api.http.get(f"/console/assets/{path}")
    assert response.status_code in (404, 405)
    assert "create_app" not in response.text


@pytest.mark.parametrize("file", [file for file in FILES if "vendor" in file])
def test_kept_libraries_have_their_license(file: str) -> None:
    assert "Copyright" in (CONSOLE / file).with_name("LICENSE").read_text()


async def test_the_root_leads_to_the_console(api: ApiUnderTest) -> None:
    response = await api.http.get("/", follow_redirects=True)
    assert response.url == f"{api.url}/console"
    assert "<title>Penstock console</title>" in response.text


async def test_the_page_is_not_part_of_the_api(api: ApiUnderTest) -> None:
    paths = (await api.http.get("/openapi.json")).json()["paths"]
    assert not [path for path in paths if path.startswith("/console")]


@needs_chromium
async def test_an_api_that_needs_no_key_asks_for_none(api: ApiUnderTest) -> None:
    async with opened_page(f"{api.url}/console#live") as page:
        await expect(page.get_by_text("Throughput of the workers").first).to_be_visible()
        await expect(page.locator("#main")).to_be_focused()
