"""The start of every route: authentication, options from headers, and the body.

Work is canceled if the caller hangs up or its key is revoked in the meantime. The lifespan opens
the dependencies of routes and stores them in the app's state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import HTTPConnection, Request
from starlette.types import Receive

from api.batches.files import BatchFiles
from api.batches.service import Batches
from api.bodies import check_amount, strip_mark
from api.dispatch.admission import Admission
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.readiness import Readiness
from api.dispatch.request import (
    InferenceRequest,
    InferenceResponse,
    NewRecord,
    RequestOptions,
    headers_of_run,
)
from api.errors import ClientGone
from api.http.auth import Access, check_access, check_model, may_see
from api.http.middleware import RequestContext, context_of
from api.http.refusals import Refusals
from api.http.request_options import PRIORITY_HEADER, read_options
from api.http.upload_form import check_charset
from api.idempotency.service import IdempotencyService
from api.inputs.files import Files
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import ImageCaller, SourceImages
from api.inputs.storage import Storage, StorageQuota
from api.limits.limited_request import LimitedRequest
from api.limits.limiter import Limiter
from api.limits.preparation import Preparation
from api.predictions.conversations import Conversations
from api.predictions.creation import OWNER, Creation, PredictionSnapshot, ids_of, version_of
from api.predictions.event_stream import EventStreams
from api.predictions.follower import PredictionFollower
from api.predictions.generation_stream import GenerationStreams
from api.predictions.results import ResultFetcher
from api.predictions.service import GRACE_S, Predictions
from api.tasks.base import Inputs
from api.usage.service import ReportService, UsageService
from shared.errors import DeadlineExceeded, PenstockError
from shared.models.catalog import Catalog, Model, unknown_model
from shared.models.entry import ServedApi
from shared.models.tasks import Input, Result
from shared.models.tasks.custom import stores_files, streams_of
from shared.money.charge import price_of, step_prices_of
from shared.predictions import Prediction
from shared.settings import ApiSettings
from shared.stores.objects import ObjectStore, UrlSigner
from shared.tenants.plan import Caller

CHECK_S = 2.0
"""Interval at which a waiting caller is checked again."""
T = TypeVar("T")

B = TypeVar("B", bound=BaseModel)

_NO_OPTIONS = RequestOptions()


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
    generation_streams: GenerationStreams
    storage: Storage
    files: Files
    batch_files: BatchFiles
    batches: Batches
    result_fetcher: ResultFetcher
    source_images: SourceImages
    usage: UsageService
    reports: ReportService
    started_at_s: float


def dependencies_of(request: Request) -> Dependencies:
    dependencies = request.app.state.dependencies
    assert isinstance(dependencies, Dependencies), (
        "the lifespan sets them before the first request; this is a bug"
    )
    return dependencies


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], check: Callable[[], object] = lambda: None
) -> T:
    """Awaits `work`, and cancels it as soon as the caller hangs up.

    Args:
        receive: ASGI channel of the request, whose body is already read.
        check: called every CHECK_S. It raises PenstockError once the caller may no longer wait,
            which also cancels `work`.

    Raises:
        PenstockError: what `check` raised.
    """
    task = asyncio.current_task()
    assert task is not None, "routes run in tasks; this is a bug"
    watch = _Watch(receive, check, task)
    try:
        return await work
    except asyncio.CancelledError:
        # Clears only its own cancellation. The server also cancels tasks when it stops.
        if watch.refused is not None and task.uncancel() == 0:
            raise watch.refused from None
        raise
    finally:
        watch.stop()


@lru_cache(maxsize=256)
def _base_url(scheme: str, host: str, server: tuple[str, int | None] | None, root: str) -> str:
    """The URL that the caller used. Starlette computes the same, but takes 40 µs each time."""
    headers = [(b"host", host.encode("latin-1"))] if host else []
    scope = {"type": "http", "scheme": scheme, "server": server, "root_path": root}
    return str(HTTPConnection({**scope, "path": "/", "headers": headers}).base_url).rstrip("/")


class _Watch:
    """Cancels a request's task once its caller hangs up or may no longer wait.

    Starts in the next turn of the event loop: anything that does not wait has finished by then. It
    refers to itself through a handle, a timer and a task, all of which end with `stop`. Otherwise,
    all objects of a request would stay in memory until the next garbage collection.
    """

    def __init__(
        self, receive: Receive, check: Callable[[], object], task: asyncio.Task[Any]
    ) -> None:
        self.refused: PenstockError | None = None
        """Why it canceled the task. None: it did not."""
        self._receive = receive
        self._check = check
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = self._loop.call_soon(self._begin)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._listening is not None:
            self._listening.remove_done_callback(self._on_disconnect)
            self._listening.cancel()
            self._listening = None

    def _begin(self) -> None:
        self._listening = self._loop.create_task(_until_disconnected(self._receive))
        self._listening.add_done_callback(self._on_disconnect)
        self._timer = self._loop.call_later(CHECK_S, self._check_again)

    def _on_disconnect(self, listening: asyncio.Task[None]) -> None:
        if not listening.cancelled():
            self._cancel(ClientGone())

    def _check_again(self) -> None:
        try:
            self._check()
        except PenstockError as error:
            self._cancel(error)
        else:
            self._timer = self._loop.call_later(CHECK_S, self._check_again)

    def _cancel(self, reason: PenstockError) -> None:
        if self.refused is None:
            self.refused = reason
            self._task.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class ApiRequest:
    """An authenticated request, with everything that a route needs to answer it."""

    http: Request
    dependencies: Dependencies
    context: RequestContext
    caller: Caller
    options: RequestOptions
    _preparation: Preparation | None = None

    async def read_json(self, kind: type[B]) -> B:
        """Reads the body as `kind`, without type coercion such as numbers in quotes.

        Raises:
            ValidationError: the body is not JSON, or does not match `kind`.
            BodyTooLarge: the body is larger than the API accepts.
            InputTooLarge: the body has more values than any request needs.
        """
        body = await self.json_body()
        check_amount(body)
        return kind.model_validate_json(body, strict=True)

    async def json_body(self) -> bytes:
        """Reads the body, without the byte order mark that some clients put before JSON."""
        return strip_mark(await self.http.body())

    def check_charset(self) -> None:
        """Accepts only forms in UTF-8.

        Raises:
            BadInput: the form has another charset.
        """
        check_charset(self.http.headers.get("content-type", ""))

    @asynccontextmanager
    async def inferred(
        self, model: Model, inputs: Sequence[Input], *, is_repeatable: bool = True
    ) -> AsyncGenerator[InferenceResponse]:
        """Computes `inputs`. The block builds the answer from the results.

        The request is charged if the block ends without an error. Rows, response headers and
        budgets all agree.

        Raises:
            PenstockError: an item failed, or the request was rejected. RateLimited: by its plan.
        """
        context = self.context
        request = self._awaited(model, inputs, is_repeatable=is_repeatable)
        async with self.limited(model, inputs, self.options.limit_s(model.deadline)) as limited:
            response = await while_connected(
                self.http.receive, self.dependencies.dispatcher.dispatch(request), self.check_key
            )
            context.has_rows = True
            try:
                with response:
                    response.raise_failed()
                    yield response
            finally:
                context.headers |= response.headers()
                limited.settle(
                    response.price, response.outcomes, is_delivered=response.is_delivered
                )

    async def asked_before(self, model: Model, inputs: Sequence[Input]) -> list[Result | None]:
        """Returns a worker's answers about `inputs`, on which this request's items are based.

        This step is free. Its work counts toward the per-minute limits as part of the request, even
        if the request is rejected afterwards. Its rows have a separate ID.

        Raises:
            PenstockError: an item failed, or there is no room. ClientGone: the caller hung up.
            RateLimited: a per-minute limit is reached.
        """
        await self.preparation(model).begin(sum(one.estimate_work(model) for one in inputs))
        facts = msgspec.structs.replace(
            self.context.facts,
            request_id=f"{self.context.facts.request_id}-before",
            price_share=0.0,
        )
        due_s = self.answer_by_s(model)
        request = InferenceRequest(facts, model, inputs, due_s, self.options)
        response = await while_connected(
            self.http.receive, self.dependencies.dispatcher.dispatch(request), self.check_key
        )
        with response:
            response.raise_failed()
            return [outcome.result for outcome in response.outcomes]

    @asynccontextmanager
    async def created(self, request: InferenceRequest, *, waits: bool) -> AsyncGenerator[Creation]:
        """Creates a prediction, or finds the one created by an equal request.

        The block may wait for its end.

        Its cost is counted when it ends, here or on any instance.

        Args:
            request: the request returned by `recorded`.

        Raises:
            PenstockError: as raised by `Predictions.creating`. RateLimited: by its plan.
            StorageFull: its results may be files, and the tenant's storage quota is used up.
        """
        dependencies, new = self.dependencies, request.new_record
        if stores_files(request.model):
            await dependencies.storage.check(self.storage_quota("input"))
        longest_s = self.options.done_within_s(request.model.deadline)
        async with self.limited(request.model, request.inputs, longest_s) as limited:
            hold = limited.hold(new.prediction, dependencies.follower.follow)
            creating = dependencies.predictions.creating(request, waits=waits, hold=hold)
            async with creating as creation:
                if not creation.is_new:
                    limited.settle(request.price, [])
                yield creation
                if creation.is_new and (reply := creation.snapshot.record.reply) is not None:
                    limited.settle(request.price, reply.outcomes)

    async def run_flow(self, request: InferenceRequest) -> PredictionSnapshot:
        """Runs a flow whose caller waits for its end. Cancels it once no caller waits any more.

        Args:
            request: the request returned by `recorded`.

        Returns:
            Its prediction, which has succeeded or failed.

        Raises:
            PenstockError: as raised by `created`. DeadlineExceeded: it took too long.
        """
        async with self.created(request, waits=True) as creation:
            limit_s = request.deadline_s - time.time() + GRACE_S
            prediction = creation.snapshot.prediction
            try:
                await while_connected(self.http.receive, creation.wait(limit_s), self.check_key)
            except BaseException:
                await self.dependencies.predictions.end(creation.snapshot)
                raise
        record = creation.snapshot.record
        if not record.is_over:
            raise DeadlineExceeded
        if record.reply is not None:
            self.context.headers |= headers_of_run(prediction, record.reply.outcomes)
        self.context.headers["location"] = f"/v1/predictions/{prediction.id}"
        return creation.snapshot

    def recorded(
        self, model: Model, read: Inputs, *, digest: str, own_id: str = "", **shown: Any
    ) -> InferenceRequest:
        """Returns the request for a prediction with the inputs `read`.

        Args:
            model: the model that computes it.
            digest: digest of the whole request.
            own_id: the ID chosen by the caller, if any.
            shown: additional fields of its document.
        """
        key = self.options.idempotency_key
        prediction_id, record_id = ids_of(self.tenant, own_id, key)
        facts = msgspec.structs.replace(self.context.facts, request_id=record_id)
        done_by_s = self.done_by_s(model)
        prediction = Prediction(
            id=prediction_id,
            record=record_id,
            tenant=facts.tenant,
            model=model.name,
            version=version_of(model),
            input=read.shown,
            is_list=read.is_list,
            output_format=read.output_format,
            base_url=self.base_url,
            created_at_s=facts.received_at_s,
            deadline_s=done_by_s,
            digest=digest,
            client_request_id=facts.client_request_id,
            key_id=facts.key_id,
            is_cached=read.is_repeatable and self.options.cache_write,
            price=price_of(model, facts.received_at_s),
            streams=streams_of(model),
            flow=None if model.flow is None else model.flow.as_json(),
            step_prices=step_prices_of(model, facts.received_at_s),
            **{"owner": OWNER} | shown,
        )
        return InferenceRequest(
            facts,
            model,
            read.inputs,
            done_by_s,
            self.options,
            read.is_repeatable,
            NewRecord(prediction, self.caller.plan.prediction_keep_s, bool(own_id or key)),
        )

    def _awaited(
        self, model: Model, inputs: Sequence[Input], *, is_repeatable: bool = True
    ) -> InferenceRequest:
        """Returns the request for inputs whose results the caller waits for."""
        due_s = self.answer_by_s(model)
        return InferenceRequest(
            self.context.facts, model, inputs, due_s, self.options, is_repeatable
        )

    def answer_by_s(self, model: Model) -> float:
        """Returns the Unix time at which the answer is due."""
        return self.context.facts.received_at_s + self.options.limit_s(model.deadline)

    def done_by_s(self, model: Model) -> float:
        """Returns the Unix time at which a prediction is stopped."""
        return self.context.facts.received_at_s + self.options.done_within_s(model.deadline)

    def check_key(self) -> None:
        """Rejects a caller whose key has ended since the request began.

        Call it in anything that takes long.

        Raises:
            Unauthorized: the key was revoked or has expired, or its secret is no longer valid.
        """
        self.dependencies.access.caller_of(self.http.scope["headers"])

    def limited(self, model: Model, inputs: Sequence[Input], longest_s: float) -> LimitedRequest:
        """Returns a context that runs within the caller's limits. See LimitedRequest."""
        return LimitedRequest(
            self.dependencies.limiter,
            self.caller,
            model,
            inputs,
            self.context.headers,
            received_at_s=self.context.facts.received_at_s,
            longest_s=longest_s,
            price_share=self.context.facts.price_share,
            preparation=self._preparation,
        )

    def preparation(self, model: Model) -> Preparation:
        """Returns a counter for work done on this request's behalf before it runs `model`."""
        if self._preparation is None:
            self._preparation = Preparation(
                self.dependencies.limiter,
                self.caller,
                model,
                self.context.headers,
                received_at_s=self.context.facts.received_at_s,
            )
        return self._preparation

    def file_owner(
        self, model: Model, field: str, deadline_s: float, keep_s: float = 0
    ) -> ImageCaller:
        """Returns the owner of the files in field `field` of the body.

        Args:
            model: the model that the request is for.
            field: field named by errors about the storage quota.
            deadline_s: Unix time at which work on the files is stopped.
            keep_s: seconds to keep a file that belongs to the request.
        """
        begin = self.preparation(model).begin
        quota = self.storage_quota(field)
        return ImageCaller(self.tenant, quota, self.base_url, deadline_s, keep_s, begin)

    def check_room(self, model: Model, items: int) -> None:
        """Rejects early what `inferred` would reject, before the route prepares inputs.

        Only for requests that rarely hit the cache.

        Raises:
            Overloaded: there is no room for the items, or not enough time until the deadline.
        """
        request = self._awaited(model, ())
        remaining_s = request.deadline_s - time.time()
        self.dependencies.admission.check(request.demand(items), remaining_s=remaining_s)

    def use(self, model: Model) -> None:
        """Records `model` as the one that this request runs, for metrics and rows as well.

        Raises:
            ModelForbidden: the key may not use the model.
        """
        self.context.model = model.name
        check_model(self.caller, model.name)

    def serving(self, api: ServedApi, name: str | None) -> Model:
        """Returns the model that serves an endpoint, and records it with `use`.

        Raises:
            UnknownModel: the model does not exist, or does not serve this endpoint.
            ModelForbidden: the key may not use the model, whatever it serves.
        """
        catalog = self.dependencies.catalog
        if name is not None:
            self.use(catalog.find(name))
        model = catalog.serving(api, name)
        self.use(model)
        return model

    async def prediction(self, prediction_id: str) -> PredictionSnapshot:
        """Returns the current state of a prediction of the tenant, from any endpoint.

        Raises:
            NotFound: the tenant does not have such a prediction, or it has expired.
            Forbidden: the key does not permit this with results of that endpoint or model.
        """
        snapshot = await self.dependencies.predictions.read(self.tenant, prediction_id)
        route = self.http.scope["route"].path
        check_access(self.caller, self.http.method, route, snapshot.prediction)
        return snapshot

    def lists(self, snapshot: PredictionSnapshot) -> bool:
        """Returns whether a list of predictions includes this one for the caller."""
        return may_see(self.caller, self.http.scope["route"].path, snapshot.prediction)

    def listed_models(self) -> list[Model]:
        """Returns the models that the caller may see."""
        models, allowed = self.dependencies.catalog.served, self.caller.models
        return [model for model in models if allowed is None or model.name in allowed]

    def listed_model(self, name: str) -> Model:
        """Returns the model of this name if the caller may see it.

        Raises:
            UnknownModel: the model is not served, or not visible to this key.
        """
        model = self.dependencies.catalog.find(name)
        if self.caller.models is not None and model.name not in self.caller.models:
            raise unknown_model(name)
        return model

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def base_url(self) -> str:
        """The API's URL as seen by the caller, without a trailing slash."""
        public_url = self.dependencies.settings.public_url
        if public_url:
            return public_url.rstrip("/")
        scope = self.http.scope
        host = self.http.headers.get("host", "")
        root = scope.get("app_root_path", scope.get("root_path", ""))
        return _base_url(scope["scheme"], host, scope.get("server"), root)

    @property
    def body_bytes(self) -> int | None:
        """The body size announced in the request. None if not announced."""
        length = self.http.headers.get("content-length", "")
        return int(length) if length.isascii() and length.isdigit() else None

    def storage_quota(self, field: str) -> StorageQuota:
        """Returns the tenant's storage quota. Errors about it name `field`."""
        own_bytes = self.caller.plan.storage_max_bytes
        usual_bytes = self.dependencies.settings.files_max_bytes
        return StorageQuota(self.tenant, usual_bytes if own_bytes is None else own_bytes, field)

    def link_to(self, key: str, media_type: str) -> str:
        """Returns a URL that serves an object for the next 60 minutes."""
        return self.base_url + self.dependencies.url_signer.path(key, media_type)


def authenticate(request: Request) -> ApiRequest:
    """Authenticates a request and checks the key's scope. Every route calls this first.

    Raises:
        Unauthorized: the API key is missing or invalid.
        Forbidden: the key does not permit this request.
        Unavailable: the keys are not known yet.
    """
    dependencies, context = dependencies_of(request), context_of(request)
    caller = dependencies.access.caller_of(request.scope["headers"])
    facts = context.facts
    facts.tenant, facts.key_id = caller.tenant, caller.key_id
    facts.plan, facts.weight = caller.plan_name, caller.plan.weight
    context.record_refusal = dependencies.refusals.write_row
    check_access(caller, request.method, request.scope["route"].path)
    return ApiRequest(request, dependencies, context, caller, _NO_OPTIONS)


def open_request(request: Request) -> ApiRequest:
    """Authenticates a request and reads its options, for routes that run models.

    Raises:
        Unauthorized: the API key is missing or invalid.
        Forbidden: the key does not permit this request.
        BadInput: a header has an invalid value.
    """
    call = authenticate(request)
    context, facts = call.context, call.context.facts
    if context.options is None:
        context.options = read_options(request.scope["headers"], facts)
    call.options = context.options
    if call.caller.max_priority == "batch" and facts.priority == "interactive":
        # The plan does not allow another priority. Clients that don't know about priorities still
        # work.
        facts.priority = "batch"
        context.headers[PRIORITY_HEADER] = "batch"
    return call
