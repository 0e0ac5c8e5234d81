"""Routes for load jobs with a file, which is sent in a multipart request or as a resumable upload.

Source: https://docs.cloud.google.com/bigquery/docs/reference/api-uploads
"""

import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import IO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bigquery_emulator.engine.job import BigQueryJob
from bigquery_emulator.engine.loads import run_load
from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import (
    BusyError,
    InvalidError,
    NotFoundError,
    ServiceError,
    TooLargeError,
)
from bigquery_emulator.routes.jobs import new_job
from bigquery_emulator.routes.messages import (
    body_parts,
    json_body,
    json_object,
    service_of,
    whole_body,
)
from bigquery_emulator.routes.options import SessionOptions, UploadOptions, query_options
from bigquery_emulator.tables.resources import DatasetKey
from bigquery_emulator.tables.schema import Json

_MOST_MULTIPART_BYTES = 64 * 1024 * 1024
_MOST_FILE_BYTES = 5 * 1024 * 1024 * 1024
_SPOOL_BYTES = 16 * 1024 * 1024
_MOST_SESSIONS = 100
_SESSION_S = 3_600.0
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)", re.ASCII)


def _spool() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)


@dataclass
class Session:
    """A resumable upload in progress."""

    project: str
    body: Json
    file: IO[bytes] = field(default_factory=_spool)
    size_bytes: int = 0
    touched_s: float = field(default_factory=time.monotonic)
    is_held: bool = False


class Sessions:
    """Uploads in progress, keyed by ID. Abandoned uploads are dropped."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, session: Session) -> str:
        """Stores a new upload and returns its ID.

        Raises:
            BusyError: too many uploads are in progress.
        """
        oldest_s = time.monotonic() - _SESSION_S
        for name, other in list(self._sessions.items()):
            if other.touched_s < oldest_s and not other.is_held:
                self.close(name)
        if len(self._sessions) >= _MOST_SESSIONS:
            raise BusyError(
                f"Exceeded rate limits: more than {_MOST_SESSIONS} uploads are in progress"
            )
        name = secrets.token_urlsafe(18)
        self._sessions[name] = session
        return name

    @contextmanager
    def held(self, name: str) -> Iterator[Session]:
        """Locks an upload while a request is using it.

        Raises:
            InvalidError: another request is using the upload.
            NotFoundError: the upload does not exist.
        """
        session = self._sessions.get(name)
        if session is None:
            raise NotFoundError("Not found: upload session")
        if session.is_held:
            raise InvalidError("Another request is already sending part of this upload")
        session.is_held, session.touched_s = True, time.monotonic()
        try:
            yield session
        finally:
            session.is_held = False

    def drop(self, name: str) -> None:
        """Forgets an upload. The job now owns the file."""
        del self._sessions[name]

    def close(self, name: str) -> None:
        """Drops an upload and its data."""
        self._sessions.pop(name).file.close()


async def upload(request: Request) -> Response:
    """Starts a load that includes its file, or a session for uploading the file in parts."""
    if query_options(request, UploadOptions)["uploadType"] == "multipart":
        return await _multipart(request)
    return await _open_session(request)


async def resume(request: Request) -> Response:
    """Accepts the next part of a resumable upload. The last part starts the job."""
    sessions: Sessions = request.app.state.sessions
    name = query_options(request, SessionOptions).get("upload_id", "")
    with sessions.held(name) as session:
        if not await _takes_part(session, request):
            return _incomplete(session)
        sessions.drop(name)
    return await _start(request, session)


async def _takes_part(session: Session, request: Request) -> bool:
    """Appends a request's part. Returns whether the file is complete."""
    match = _RANGE.fullmatch(request.headers.get("content-range", "bytes 0-0/*"))
    if match is None:
        raise InvalidError("Invalid value for Content-Range: must be bytes FIRST-LAST/TOTAL")
    first, total = match.group(1), match.group(3)
    if "content-range" not in request.headers:
        # A request that contains the whole file has no Content-Range.
        await _append(session, request)
        return True
    if first is not None:
        if int(first) != session.size_bytes:
            return False
        await _append(session, request)
    return total != "*" and session.size_bytes >= int(total)


async def _append(session: Session, request: Request) -> None:
    async for part in body_parts(request):
        session.size_bytes += len(part)
        if session.size_bytes > _MOST_FILE_BYTES:
            raise TooLargeError(f"The file exceeds the maximum of {_MOST_FILE_BYTES} bytes")
        session.file.write(part)


def _incomplete(session: Session) -> Response:
    headers = {"Range": f"bytes=0-{session.size_bytes - 1}"} if session.size_bytes else {}
    return Response(status_code=308, headers=headers)


async def _open_session(request: Request) -> Response:
    sessions: Sessions = request.app.state.sessions
    project = request.path_params["project"]
    body = await json_body(request)
    new_job(project, body)
    name = sessions.open(Session(project, body))
    # A header may contain only Latin-1 characters, but a project name may contain any character.
    path = quote(request.url.path)
    place = request.url.replace(path=path, query=f"uploadType=resumable&upload_id={name}")
    return Response(headers={"Location": str(place), "X-GUploader-UploadID": name})


async def _multipart(request: Request) -> Response:
    description, content = _parts(
        await whole_body(request, _MOST_MULTIPART_BYTES), request.headers.get("content-type", "")
    )
    session = Session(request.path_params["project"], description)
    session.file.write(content)
    return await _start(request, session)


def _parts(body: bytes, content_type: str) -> tuple[Json, bytes]:
    """Extracts the job JSON and the file from a multipart/related body (RFC 2387)."""
    match = re.search(r'boundary="?([^";]+)"?', content_type)
    if match is None:
        raise InvalidError("Multipart body without a boundary")
    mark = b"--" + match.group(1).encode()
    # Google's clients use both kinds of line endings.
    newline = b"\r\n" if mark + b"\r\n" in body else b"\n"
    parts = (newline + body).split(newline + mark)[1:-1]
    if len(parts) != 2:
        raise InvalidError("A load must have two parts: its description and its file")
    contents = [part.partition(newline * 2)[2] for part in parts]
    return json_object(contents[0]), contents[1]


async def _start(request: Request, session: Session) -> Response:
    service = service_of(request)
    try:
        job = new_job(session.project, session.body)
        if job.kind != "LOAD":
            raise InvalidError("Only a load job accepts a file")
        job.location = _location(service, job, session.body)
    except ServiceError:
        session.file.close()
        raise
    service.jobs.start(job, partial(_load_and_close, service, session.file))
    return JSONResponse(job.resource())


def _location(service: BigQueryService, job: BigQueryJob, body: Json) -> str:
    """Returns a load's location, which defaults to its table's location."""
    reference = job.configuration["load"].get("destinationTable") or {}
    named = DatasetKey(reference.get("projectId", job.project), reference.get("datasetId", ""))
    dataset = service.catalog.datasets.get(named)
    if dataset is None or (body.get("jobReference") or {}).get("location"):
        return job.location
    return str(dataset.settings.get("location", job.location))


async def _load_and_close(service: BigQueryService, file: IO[bytes], job: BigQueryJob) -> None:
    try:
        await run_load(service, file, job)
    finally:
        file.close()
