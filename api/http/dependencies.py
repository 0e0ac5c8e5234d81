"""The app's services. The lifespan opens the services and stores them in the app's state.

Endpoints declare the services they need as parameters (api/http/injection.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from starlette.requests import Request

from api.batches.files import BatchFiles
from api.batches.service import Batches
from api.dispatch.admission import Admission
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.readiness import Readiness
from api.http.auth import Access, AccessRules
from api.http.inference import Inference
from api.http.recording import Recording
from api.http.refusals import Refusals
from api.idempotency.service import IdempotencyService
from api.inputs.files import Files
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.inputs.storage import Storage
from api.limits.limiter import Limiter
from api.predictions.conversations import Conversations
from api.predictions.event_stream import EventStreams
from api.predictions.follower import PredictionFollower
from api.predictions.generation_stream import GenerationStreams
from api.predictions.progress import PredictionProgress
from api.predictions.results import ResultFetcher
from api.predictions.service import Predictions
from api.usage.service import ReportService, UsageService
from shared.models.catalog import Catalog
from shared.settings import ApiSettings
from shared.stores.objects import ObjectStore, UrlSigner
from shared.stores.token_streams import TokenStreams
from shared.stores.webhook_log import WebhookLog
from shared.webhooks.publisher import WebhookPublisher

StartedAt = NewType("StartedAt", float)
"""Unix seconds."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """One instance of each service, by type. Open while the app is running."""

    settings: ApiSettings
    catalog: Catalog
    access: Access
    access_rules: AccessRules
    admission: Admission
    dispatcher: Dispatcher
    refusals: Refusals
    limiter: Limiter
    objects: ObjectStore
    url_signer: UrlSigner
    image_codec: ImageCodec
    inference: Inference
    recording: Recording
    readiness: Readiness
    idempotency: IdempotencyService
    predictions: Predictions
    conversations: Conversations
    follower: PredictionFollower
    progress: PredictionProgress
    event_streams: EventStreams
    generation_streams: GenerationStreams
    tokens: TokenStreams
    webhooks: WebhookPublisher
    webhook_log: WebhookLog
    storage: Storage
    files: Files
    batch_files: BatchFiles
    batches: Batches
    result_fetcher: ResultFetcher
    source_images: SourceImages
    usage: UsageService
    reports: ReportService
    started_at_s: StartedAt


def dependencies_of(request: Request) -> Dependencies:
    """Returns the services belonging to the app that received a request."""
    dependencies = request.scope["app"].state.dependencies
    assert isinstance(dependencies, Dependencies), (
        "the lifespan sets them before the first request; this is a bug"
    )
    return dependencies
