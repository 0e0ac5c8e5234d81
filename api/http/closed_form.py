"""Reads a form, and closes every file of it, also one that the body ends within."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request


@asynccontextmanager
async def closed_form(request: Request, **limits: int) -> AsyncIterator[FormData]:
    """Opens a form of type multipart/form-data, as `Request.form` does, and closes it.

    `Request.form` leaves a file open that a cut body did not bring to its end.

    Args:
        request: its body was not read.
        limits: those of starlette's MultiPartParser: `max_files`, `max_fields`, `max_part_size`.

    Raises:
        HTTPException: 400, the body is no such form.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        yield FormData()
        return
    async with aclosing(request.stream()) as stream:
        parser = MultiPartParser(request.headers, stream, **limits)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise HTTPException(400, error.message) from error
        try:
            yield form
        finally:
            for file in parser._files_to_close_on_error:
                file.close()
