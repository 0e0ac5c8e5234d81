"""What the routes work with: the parts that the lifespan opened, found through the app's state."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from api.dispatch.admission import Admission
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.readiness import Readiness
from api.http.auth import Tenants
from api.http.refusals import Refusals
from api.idempotency.service import Repeats
from api.inputs.files import Files
from api.inputs.image_codec import Studio
from api.predictions.event_stream import Streams
from api.predictions.inputs import InputReader
from api.predictions.results import Fetcher
from api.predictions.service import Predictions
from shared.catalog import Catalog
from shared.settings import ApiSettings
from shared.stores.objects import ObjectStore
from shared.stores.signed_urls import Links


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an endpoint may need; open for as long as the app runs."""

    settings: ApiSettings
    catalog: Catalog
    tenants: Tenants
    admission: Admission
    dispatcher: Dispatcher
    refusals: Refusals
    objects: ObjectStore
    links: Links
    studio: Studio
    readiness: Readiness
    repeats: Repeats
    predictions: Predictions
    streams: Streams
    files: Files
    fetcher: Fetcher
    input_reader: InputReader
    started_at_s: float


def parts_of(request: Request) -> Parts:
    """The parts of the app that answers this request."""
    parts = request.app.state.parts
    assert isinstance(parts, Parts), "the lifespan sets them before the first request; this is a bug"
    return parts
