"""Predictions API responses, for the OpenAPI document.

The routes write these bodies themselves. Field names follow Replicate's API
(https://replicate.com/docs/reference/http).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Moment = Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]
Link = Annotated[str, msgspec.Meta(extra_json_schema={"format": "uri"})]


class PredictionUrls(msgspec.Struct):
    """URLs for fetching, canceling, and streaming the prediction."""

    get: Link
    cancel: Link
    stream: Link
    web: Link


class StepReply(msgspec.Struct):
    """A flow step's progress: completed items and what they cost."""

    id: str
    model: str
    items: Count
    failed: Count
    cost_usd: Amount


class PredictionTimes(msgspec.Struct, omit_defaults=True):
    """Times are in seconds under Replicate's names and in milliseconds under RunPod's.

    Each field appears as soon as its value is known.

    `truncated_tokens` is the number of tokens cut from all texts if the input has `truncate`, or
    from image prompts if that number is known. `input_token_count` and `output_token_count` are the
    numbers of tokens that a text model read and generated, even if it was stopped. `device_time` is
    the prediction's share of a whole device, and `cost_usd` is its charge, as in the usage report.
    `steps` lists a flow's steps.
    """

    total_time: Seconds | msgspec.UnsetType = msgspec.UNSET
    predict_time: Seconds | msgspec.UnsetType = msgspec.UNSET
    delayTime: Count | msgspec.UnsetType = msgspec.UNSET
    executionTime: Count | msgspec.UnsetType = msgspec.UNSET
    truncated_tokens: Count | msgspec.UnsetType = msgspec.UNSET
    input_token_count: Count | msgspec.UnsetType = msgspec.UNSET
    output_token_count: Count | msgspec.UnsetType = msgspec.UNSET
    device_time: Seconds | msgspec.UnsetType = msgspec.UNSET
    cost_usd: Amount | msgspec.UnsetType = msgspec.UNSET
    steps: list[StepReply] | msgspec.UnsetType = msgspec.UNSET


class QueueReply(msgspec.Struct):
    """The prediction's position among your tenant's predictions waiting for the same model.

    `estimated_s` is the time until a worker takes it, based on the last half minute. It is null
    until there is enough data.
    """

    position: Annotated[int, msgspec.Meta(ge=1)]
    estimated_s: Seconds | None


class PredictionReply(msgspec.Struct):
    """A prediction in its current state."""

    id: str
    model: str
    version: str
    deployment: str | None
    source: Literal["api"]
    endpoint: str | None
    """Extension: path of the endpoint that created the prediction, such as `/v1/images/edits`.

    Null: created as a prediction. Otherwise, `input` may be missing files.
    """
    status: Literal["starting", "processing", "succeeded", "failed", "canceled"]
    input: dict[str, Any]
    output: Any
    """One or more vectors, image URLs, a string of text, or a custom model's output, as described
    in the model's `openapi_schema`.

    Null until the prediction has succeeded, except for a custom model that yields: its list grows
    while the prediction runs, and is kept if the prediction fails or is canceled. Prediction lists
    include it only once the prediction has finished.
    """
    logs: str
    error: str | None
    metrics: PredictionTimes
    queue: QueueReply | None
    """Null if it is unknown: once a worker has taken the prediction, in lists, and in the response
    to the request that creates it.
    """
    data_removed: bool
    created_at: Moment
    started_at: Moment | None
    completed_at: Moment | None
    deadline: Moment
    urls: PredictionUrls
    api_key_id: str | msgspec.UnsetType | None = msgspec.UNSET
    """The public ID of the API key that created it. Only in lists with `include=api_key_id`."""


class PredictionsPage(msgspec.Struct):
    """A page of predictions, newest first."""

    previous: Link | None
    next: Link | None
    results: list[PredictionReply]


class WebhookAttemptReply(msgspec.Struct, kw_only=True):
    """An attempt to deliver an event. `attempt` counts attempts with the same `webhook_id`."""

    webhook_id: str
    event: str
    attempt: Count
    created_at: Moment
    duration_ms: Amount
    status: int | None
    """HTTP status of the receiver's response. Null if there was no response."""
    error: str | None
    """Why there was no response, or a note that the response was a redirect, which is not followed.
    Otherwise null.
    """


class WebhookAttempts(msgspec.Struct):
    """The attempts to deliver a prediction's events."""

    results: list[WebhookAttemptReply]


class VersionReply(msgspec.Struct):
    """A model version, with its input and output schemas."""

    id: str
    created_at: Moment
    cog_version: str
    openapi_schema: dict[str, Any]


class VersionsPage(msgspec.Struct):
    """A model's versions."""

    previous: None
    next: None
    results: list[VersionReply]


class ReplicateModel(msgspec.Struct):
    """A model in Replicate's format."""

    url: Link
    owner: str
    name: str
    description: str
    visibility: Literal["public"]
    github_url: None
    paper_url: None
    license_url: None
    run_count: Count
    cover_image_url: None
    default_example: None
    latest_version: VersionReply


class ModelsPage(msgspec.Struct):
    """A page of models, for Replicate's clients."""

    previous: Link | None
    next: Link | None
    results: list[ReplicateModel]


class DeploymentConfiguration(msgspec.Struct):
    """The model's hardware."""

    hardware: str
    min_instances: Count
    max_instances: Count


class Release(msgspec.Struct):
    """The deployed version."""

    number: Literal[1]
    model: str
    version: str
    created_at: Moment
    created_by: None
    configuration: DeploymentConfiguration


class DeploymentReply(msgspec.Struct):
    """A model's deployment."""

    owner: str
    name: str
    current_release: Release


class DeploymentsPage(msgspec.Struct):
    """All deployments."""

    previous: None
    next: None
    results: list[DeploymentReply]


class AccountReply(msgspec.Struct):
    """The key's tenant, as an account."""

    type: Literal["organization"]
    username: str
    name: str
    github_url: None


class Hardware(msgspec.Struct):
    """A kind of hardware that models run on."""

    sku: str
    name: str


class Checksums(msgspec.Struct):
    """Checksums of a file's data."""

    sha256: str


class FileUrls(msgspec.Struct):
    """URLs for the file's metadata and for its data (the latter valid for an hour)."""

    get: Link
    download: Link


class FileReply(msgspec.Struct):
    """A file and its metadata."""

    id: str
    name: str
    content_type: str
    size: Count
    etag: str
    checksums: Checksums
    metadata: dict[str, Any]
    created_at: Moment
    expires_at: Moment
    urls: FileUrls


class SecretReply(msgspec.Struct):
    """The secret that signs this tenant's webhooks."""

    key: str


class HealthReply(msgspec.Struct):
    """The process is running."""

    status: Literal["ok"]


class ReadinessReply(msgspec.Struct):
    """The reachable services, and whether the instance can serve requests."""

    status: Literal["ready", "degraded", "unavailable"]
    pubsub: str
    redis: str
    keys: str
