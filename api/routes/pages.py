"""GET /docs: the OpenAPI document as a page for trying the API.

All of its scripts come from api/docs_page. So it works without internet access, and no third
party's script sees a reader's key.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parents[1] / "docs_page"
HEADERS = {
    # Swagger UI draws its icons from data: URLs.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter()
assets = StaticFiles(directory=FOLDER)


@router.get("/docs", include_in_schema=False)
async def get_docs(request: Request) -> FileResponse:
    """The page itself. Its assets are under /docs/assets."""
    return FileResponse(FOLDER / "index.html", headers=HEADERS)
