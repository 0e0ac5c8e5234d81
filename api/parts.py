"""What the routes work with: the parts that the lifespan opened, found through the app's state."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from api.admission import Admission
from api.dispatcher import Dispatcher
from api.fetching import Fetcher
from api.files import Files
from api.pictures import Studio
from api.prediction_events import Streams
from api.prediction_inputs import InputReader
from api.predictions import Predictions
from api.readiness import Readiness
from api.refusals import Refusals
from api.repeats import Repeats
from api.tenants import Tenants
from shared.catalog import Catalog
from shared.links import Links
from shared.objects import ObjectStore
from shared.settings import ApiSettings


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
