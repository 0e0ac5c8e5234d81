"""The two HTML pages: GET /docs to read about the API and try it out, and GET /console to use it.

GET / redirects to the console.

All of a page's scripts come from its folder, so pages work without internet access, and no
third-party script can see a reader's key.

The console consists of the files in api/console_page. It uses only the public API, and lets readers
try models and view predictions, batches, usage, and keys. Because it shows text from untrusted
sources, its policy does not allow inline scripts or styles, and Trusted Types prevent strings from
becoming markup (https://www.w3.org/TR/trusted-types/).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from api.http.router import Router

_DOCS = Path(__file__).parents[1] / "docs_page"
_DOCS_HEADERS = {
    # Swagger UI draws its icons from data: URLs.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
CONSOLE = Path(__file__).parents[1] / "console_page"
_CONSOLE_HEADERS = {
    # Previews and small files are data: URLs. Fetched ones are blob: URLs.
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    # Modules from two releases must not be mixed, so browsers always check whether their copy is
    # current.
    "cache-control": "no-cache",
}

router = Router()

docs_assets = StaticFiles(directory=_DOCS)


class _ConsoleAssets(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_CONSOLE_HEADERS)
        return response


console_assets = _ConsoleAssets(directory=CONSOLE)


@router.get("/", include_in_schema=False)
async def get_root() -> RedirectResponse:
    """Redirects to the console. The URL is relative, so the page also works under a prefix."""
    return RedirectResponse("console", 307)


@router.get("/docs", include_in_schema=False)
async def get_docs() -> FileResponse:
    """Returns the page itself. Its assets are under /docs/assets."""
    return FileResponse(_DOCS / "index.html", headers=_DOCS_HEADERS)


@router.get("/console", include_in_schema=False)
async def get_console() -> FileResponse:
    """Returns the page itself. Its assets are under /console/assets."""
    return FileResponse(CONSOLE / "index.html", headers=_CONSOLE_HEADERS)
