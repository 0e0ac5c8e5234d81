"""The dependencies of routes, which the lifespan opens and stores in the state of the app."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from api.batches.files import BatchFiles
from api.batches.service import Batches
from api.dispatch.admission import Admission
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.readiness import Readiness
from api.http.auth import Access
from api.http.refusals import Refusals
from api.idempotency.service import IdempotencyService
from api.inputs.files import Files
from api.inputs.image_codec import ImageCodec
from api.inputs.source_pictures import SourcePictures
from api.limits.limiter import Limiter
from api.predictions.conversations import Conversations
from api.predictions.event_stream import EventStreams
from api.predictions.follower import PredictionFollower
from api.predictions.results import ResultFetcher
from api.predictions.service import Predictions
from api.predictions.text_stream import TextStreams
from api.usage.reports import ReportService
from api.usage.service import UsageService
from shared.catalog import Catalog
from shared.settings import ApiSettings
from shared.stores.objects import ObjectStore
from shared.stores.signed_urls import UrlSigner


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Everything that a route may need. Open while the app runs."""

    settings: ApiSettings
    catalog: Catalog
    access: Access
    admission: Admission
    dispatcher: Dispatcher
    refusals: Refusals
    limiter: Limiter
    objects: ObjectStore
    url_signer: UrlSigner
    image_codec: ImageCodec
    readiness: Readiness
    idempotency: IdempotencyService
    predictions: Predictions
    conversations: Conversations
    follower: PredictionFollower
    event_streams: EventStreams
    text_streams: TextStreams
    files: Files
    batch_files: BatchFiles
    batches: Batches
    result_fetcher: ResultFetcher
    source_pictures: SourcePictures
    usage: UsageService
    reports: ReportService
    started_at_s: float


def dependencies_of(request: Request) -> Dependencies:
    """Returns the dependencies of the app of this request."""
    dependencies = request.app.state.dependencies
    assert isinstance(dependencies, Dependencies), (
        "the lifespan sets them before the first request; this is a bug"
    )
    return dependencies
