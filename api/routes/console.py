"""GET /console: a page to try the models and to see predictions, batches, usage and keys.

The page consists of the files of api/console_page, which use only the public API. It shows text
from untrusted sources, so its policy allows no inline script or style, and Trusted Types forbid
markup from strings (https://www.w3.org/TR/trusted-types/).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parents[1] / "console_page"
HEADERS = {
    # Previews and small images are data: URLs. Fetched images are blob: URLs.
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    # Modules of two releases must not mix, so a browser asks each time whether its copy is right.
    "cache-control": "no-cache",
}

router = APIRouter()


class _Assets(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


assets = _Assets(directory=FOLDER)


@router.get("/console", include_in_schema=False)
async def get_console(request: Request) -> FileResponse:
    """The page itself. Its assets are under /console/assets."""
    return FileResponse(FOLDER / "index.html", headers=HEADERS)
