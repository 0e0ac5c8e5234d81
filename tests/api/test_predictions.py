"""The Predictions API over a real Redis, by plain HTTP: durable, and the same from every instance."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.local.redis import RedisServer
from shared.errors import Unavailable
from shared.messages import ImageInput, TextInput
from shared.objects import ObjectStore
from shared.records import Records
from tests.api.fake_worker import png_of, vector_of
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.fakes import InMemoryTransport

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patient_redis")]
TEXT = {"version": TEXT_MODEL.name, "input": {"text": "a cat"}}
WAIT = {"prefer": "wait=20"}
OVER = {"succeeded", "failed", "canceled"}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url, secret="s")) as running:
        yield running


async def until_over(api: ApiUnderTest, prediction: dict[str, Any]) -> dict[str, Any]:
    """The prediction once it is over, as GET shows it."""
    async with asyncio.timeout(8):
        while True:
            found: dict[str, Any] = (await api.http.get(f"/v1/predictions/{prediction['id']}")).json()
            if found["status"] in OVER:
                return found
            await asyncio.sleep(0.02)


def admitted(api: ApiUnderTest) -> int:
    return api.parts.predictions._admission.in_flight


async def test_prediction_is_answered_at_once_and_found_when_it_is_over(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    response = await api.http.post("/v1/predictions", json=TEXT)
    created = response.json()
    assert response.status_code == 201
    assert (created["status"], created["output"], created["error"]) == ("starting", None, None)
    assert created["input"] == TEXT["input"]
    assert created["urls"]["get"] == response.headers["location"] == f"{api.url}/v1/predictions/{created['id']}"
    assert admitted(api) == 0
    api.worker.go.set()
    found = await until_over(api, created)
    assert found["status"] == "succeeded"
    assert found["output"] == pytest.approx(vector_of(TextInput("a cat")).tolist())
    assert found["metrics"]["predict_time"] == 0.0025
    assert found["created_at"] < found["started_at"] < found["completed_at"] < found["deadline"]
    (job,) = api.worker.jobs
    assert (job.envelope.prediction, job.envelope.request_id, job.envelope.inbox) == ("1", created["id"], "")
    assert job.envelope.deadline_s - job.envelope.received_at_s == pytest.approx(TEXT_MODEL.deadline.longest_s)


async def test_waiting_answers_when_it_is_over(api: ApiUnderTest) -> None:
    began_s = time.monotonic()
    response = await api.http.post("/v1/predictions", json=TEXT, headers=WAIT)
    assert (response.status_code, response.json()["status"]) == (201, "succeeded")
    assert time.monotonic() - began_s < 5
    assert admitted(api) == 0


async def test_wait_that_ends_early_answers_starting_and_get_says_processing(api: ApiUnderTest) -> None:
    """Replicate's clients take `processing` in the answer to a wait for the end of it, without output."""
    api.worker.go.clear()
    began_s = time.monotonic()
    response = await api.http.post("/v1/predictions", json=TEXT, headers={"prefer": "wait=1"})
    assert time.monotonic() - began_s < 1.5
    created = response.json()
    assert created["status"] == "starting"
    assert (await api.http.get(f"/v1/predictions/{created['id']}")).json()["status"] == "processing"
    api.worker.go.set()
    assert (await until_over(api, created))["status"] == "succeeded"


async def test_who_hangs_up_does_not_cancel(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    with pytest.raises(httpx.ReadTimeout):
        await api.http.post("/v1/predictions", json=TEXT, headers=WAIT, timeout=httpx.Timeout(5, read=0.3))
    async with asyncio.timeout(5):
        while admitted(api):  # noqa: ASYNC110 - the product has no use for an event here
            await asyncio.sleep(0)
    api.worker.go.set()
    assert (await until_over(api, {"id": api.worker.jobs[0].envelope.request_id}))["status"] == "succeeded"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"text": "a"}, ["a"]),
        ({"input": "a"}, ["a"]),
        ({"texts": ["a", "b"]}, ["a", "b"]),
        ({"input": ["a"]}, ["a"]),
    ],
)
async def test_texts_come_in_several_shapes(api: ApiUnderTest, given: dict[str, Any], expected: list[str]) -> None:
    path = f"/v1/models/anyone/{TEXT_MODEL.aliases[0]}/predictions"
    found = (await api.http.post(path, json={"input": given}, headers=WAIT)).json()
    vectors = [pytest.approx(vector_of(TextInput(text)).tolist()) for text in expected]
    assert found["output"] == (vectors if isinstance(next(iter(given.values())), list) else vectors[0])
    assert found["model"] == f"anyone/{TEXT_MODEL.name}"
    assert len(api.worker.jobs) == 1


async def test_images_are_drawn_as_asked(api: ApiUnderTest) -> None:
    given = {
        "prompt": "a lighthouse",
        "negative_prompt": "fog",
        "width": 72,
        "height": 64,
        "num_inference_steps": 3,
        "guidance_scale": 2,
        "seed": 5,
        "scheduler": "euler",
        "num_outputs": 2,
    }
    path = f"/v1/deployments/acme/{IMAGE_MODEL.name}/predictions"
    found = (await api.http.post(path, json={"input": given}, headers=WAIT)).json()
    expected = [ImageInput("a lighthouse", 72, 64, 3, 2.0, seed, "euler", "fog") for seed in (5, 6)]
    assert [item.input for item in api.worker.items] == expected
    assert all(item.cache_key for item in api.worker.items)
    assert [data_of(url) for url in found["output"]] == [png_of(image) for image in expected]
    assert found["deployment"] == f"acme/{IMAGE_MODEL.name}"


def data_of(uri: str) -> bytes:
    assert uri.startswith("data:image/png;base64,")
    return base64.b64decode(uri.partition(",")[2])


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(("output_format", "magic"), [("webp", b"RIFF"), ("jpg", b"\xff\xd8"), ("png", b"\x89PNG")])
async def test_links_lead_to_images_in_the_format_asked_for(
    api: ApiUnderTest, tmp_path: Path, output_format: str, magic: bytes, is_large: bool
) -> None:
    if is_large:
        api.worker.stores_results_in = ObjectStore(f"file://{tmp_path}/objects")
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "output_format": output_format}}
    (url,) = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()["output"]
    if output_format == "png" and not is_large:
        assert data_of(url).startswith(magic)
        return
    image = await api.http.get(url)
    assert image.status_code == 200
    assert image.content.startswith(magic)
    assert (await api.http.get(url.replace("signature=", "signature=0"))).status_code == 403


async def test_source_images_come_as_data_file_or_earlier_result(api: ApiUnderTest) -> None:
    png = png_of(ImageInput("", 64, 64, 1, 1.0, 99, "ddim"))
    uri = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    sent = (await api.http.post("/v1/files", files={"content": ("a.png", png, "image/png")})).json()
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "output_format": "webp", "seed": 1}}
    result = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()["output"][0]
    given = [uri, sent["urls"]["get"], sent["urls"]["download"], result]
    for image in given:
        wish = {"prompt": "a", "image": image, "prompt_strength": 0.5, "seed": 1}
        found = (
            await api.http.post("/v1/predictions", json={"version": IMAGE_MODEL.name, "input": wish}, headers=WAIT)
        ).json()
        assert found["status"] == "succeeded"
    sources = [item.input.image for item in api.worker.items if isinstance(item.input, ImageInput)]
    assert [source is not None for source in sources] == [False, True, True, True, True]
    assert sources[1] == sources[2] == sources[3]
    listed = (await api.http.get("/v1/predictions")).json()["results"]
    kept = listed[3]["input"]["image"]
    assert kept.startswith(f"{api.url}/v1/files/file_")
    assert (await api.http.get((await api.http.get(kept)).json()["urls"]["download"])).content == png


async def test_foreign_urls_are_not_fetched(api: ApiUnderTest) -> None:
    fetched = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetched.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for url in (f"http://127.0.0.1:{port}/a.png", f"{api.url}@127.0.0.1:{port}/v1/files/x", "file:///etc/passwd"):
            body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "image": url}}
            response = await api.http.post("/v1/predictions", json=body)
            assert response.status_code == 422
            assert "other URLs are not fetched" in response.json()["detail"]
    assert not fetched.is_set()


async def test_failure_says_why(api: ApiUnderTest) -> None:
    body = TEXT | {"input": {"text": "broken"}}
    found = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()
    assert (found["status"], found["output"]) == ("failed", None)
    assert found["error"] == "this input breaks the model"


async def test_another_instance_answers_for_one_that_is_gone(tmp_path: Path, redis_url: str) -> None:
    broker, settings = InMemoryTransport(), settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, broker, broker) as second:
        second.worker.go.clear()
        async with running_api(settings, broker, broker, worker=second.worker) as first:
            waiting = asyncio.create_task(first.http.post("/v1/predictions", json=TEXT, headers={"prefer": "wait=2"}))
            await second.worker.until_taken(1)
            # Known, waited for and canceled through another instance than the one that made it.
            (listed,) = (await second.http.get("/v1/predictions")).json()["results"]
            canceled = (await second.http.post(f"/v1/predictions/{listed['id']}/cancel")).json()
            assert canceled["status"] == "canceled"
            assert (await waiting).json()["status"] == "canceled"
            created = (await first.http.post("/v1/predictions", json=TEXT)).json()
        second.worker.go.set()
        assert (await until_over(second, created))["status"] == "succeeded"


async def test_canceled_stays_canceled(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    created = (await api.http.post("/v1/predictions", json=TEXT)).json()
    await api.worker.claimed.wait()
    first = await api.http.post(f"/v1/predictions/{created['id']}/cancel")
    assert (first.status_code, first.json()["status"]) == (200, "canceled"), first.text
    api.worker.go.set()
    again = await api.http.post(f"/v1/predictions/{created['id']}/cancel")
    assert (again.status_code, again.json()["status"], again.json()["output"]) == (200, "canceled", None)
    assert (await api.http.get(f"/v1/predictions/{created['id']}")).json()["completed_at"]


async def test_put_twice_is_one_prediction(api: ApiUnderTest) -> None:
    first, second = await asyncio.gather(
        *(api.http.put("/v1/predictions/mine.1", json=TEXT, headers=WAIT) for _ in range(2))
    )
    assert {first.status_code, second.status_code} == {200, 201}
    assert first.json()["id"] == second.json()["id"] == "mine.1"
    assert first.json()["output"] == second.json()["output"] is not None
    assert len(api.worker.jobs) == 1
    other = await api.http.put("/v1/predictions/mine.1", json=TEXT | {"input": {"text": "a dog"}})
    assert other.status_code == 422
    assert other.json()["invalid_fields"][0]["field"] == "id"
    assert (await api.http.get("/v1/predictions/mine.1")).json()["output"] == first.json()["output"]


async def test_streams_are_bounded_and_end_with_their_readers(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.prediction_events.MOST_STREAMS", 1)
    api.worker.go.clear()
    created = (await api.http.post("/v1/predictions", json=TEXT)).json()
    async with Records(str(api.parts.settings.redis_url)) as records:
        await api.worker.claimed.wait()
        await records.progress(created["id"], 1, 2)
    url = created["urls"]["stream"]
    async with api.http.stream("GET", url) as following:
        assert await anext(following.aiter_lines()) == "event: logs"
        assert (await api.http.get(url)).status_code == 429
    async with asyncio.timeout(5):
        while (response := await api.http.get(url, headers={"last-event-id": "3.0"}, timeout=5)).status_code == 429:
            api.worker.go.set()
    assert (response.status_code, response.text) == (200, "")


async def test_idempotency_key_makes_one_of_two(api: ApiUnderTest) -> None:
    headers = {"idempotency-key": "k-1"}
    one, two = [await api.http.post("/v1/predictions", json=TEXT, headers=headers) for _ in range(2)]
    assert one.json()["id"] == two.json()["id"]
    assert [answer.headers.get("idempotent-replayed") for answer in (one, two)] == [None, "true"]
    other = await api.http.post("/v1/predictions", json=TEXT | {"webhook": "https://a.example/"}, headers=headers)
    assert other.status_code == 422
    assert len(api.worker.jobs) == 1


async def test_broker_out_of_reach_promises_nothing_and_a_retry_succeeds(api: ApiUnderTest) -> None:
    api.broker.outage = Unavailable("no broker")
    response = await api.http.post("/v1/predictions", json=TEXT)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    (failed,) = (await api.http.get("/v1/predictions")).json()["results"]
    assert failed["status"] == "failed"
    assert "no broker" in failed["error"]
    assert (await api.http.put("/v1/predictions/mine", json=TEXT)).status_code == 503
    api.broker.outage = None
    retried = await api.http.put("/v1/predictions/mine", json=TEXT, headers=WAIT)
    assert retried.json()["status"] == "succeeded"


async def test_redis_out_of_reach_is_503_at_once(tmp_path: Path) -> None:
    with RedisServer(tmp_path, tmp_path) as server:
        settings = settings_for(tmp_path, redis_url=server.url)
        async with running_api(settings) as api:
            created = (await api.http.post("/v1/predictions", json=TEXT, headers=WAIT)).json()
            server.stop()
            began_s = time.monotonic()
            for method, path in (
                ("POST", "/v1/predictions"),
                ("GET", f"/v1/predictions/{created['id']}"),
                ("GET", "/v1/predictions"),
                ("POST", f"/v1/predictions/{created['id']}/cancel"),
            ):
                response = await api.http.request(method, path, json=TEXT if path.endswith("s") else None)
                assert response.status_code == 503, path
                assert response.headers["retry-after"]
                assert response.json()["status"] == 503
            assert time.monotonic() - began_s < 6
            assert len(api.worker.jobs) == 1


async def test_prediction_that_nobody_ends_is_ended_by_who_reads_it(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.GRACE_S", 0.0)
    await api.broker.ensure_topic("webhooks")
    api.worker.is_silent = True
    body = TEXT | {"webhook": "https://a.example/hook"}
    before = api.broker.published
    created = (await api.http.post("/v1/predictions", json=body, headers={"x-penstock-deadline-ms": "60"})).json()
    found = await until_over(api, created)
    assert (found["status"], found["error"]) == ("failed", "deadline exceeded: it was not done within 0.06 s")
    assert api.broker.published == before + 2  # the job, and the webhook's event
    assert api.worker.jobs[0].envelope.webhook == "start,output,logs,completed"


@pytest.mark.parametrize(("given", "seconds"), [("45s", 45), ("2m", 120), ("1h30m", 300), ("90", 90)])
async def test_cancel_after_is_the_deadline(api: ApiUnderTest, given: str, seconds: int) -> None:
    await api.http.post("/v1/predictions", json=TEXT, headers=WAIT | {"cancel-after": given})
    envelope = api.worker.jobs[0].envelope
    assert envelope.deadline_s - envelope.received_at_s == pytest.approx(seconds)


async def test_list_goes_back_page_by_page(api: ApiUnderTest) -> None:
    made = [(await api.http.post("/v1/predictions", json=TEXT)).json()["id"] for _ in range(23)]
    first = (await api.http.get("/v1/predictions")).json()
    second = (await api.http.get(first["next"])).json()
    assert [one["id"] for one in first["results"] + second["results"]] == made[::-1]
    assert second["next"] is None


async def test_tenants_see_their_own_only(tmp_path: Path, redis_url: str) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url, api_keys="a=acme,u=umbrella")
    async with running_api(settings) as api:
        acme, umbrella = ({"authorization": f"Bearer {key}"} for key in "au")
        theirs = (await api.http.put("/v1/predictions/mine", json=TEXT, headers=acme)).json()
        ours = (await api.http.post("/v1/predictions", json=TEXT, headers=acme)).json()
        file = (await api.http.post("/v1/files", files={"content": b"x"}, headers=acme)).json()
        paths = [f"/v1/predictions/{theirs['id']}", f"/v1/predictions/{ours['id']}", f"/v1/files/{file['id']}"]
        unknown = await api.http.get("/v1/predictions/pred_000000000000000000000000", headers=umbrella)
        for path in paths:
            assert (await api.http.get(path, headers=acme)).status_code == 200
            response = await api.http.get(path, headers=umbrella)
            assert (response.status_code, response.json()["title"]) == (404, unknown.json()["title"])
        cancel = await api.http.post(f"/v1/predictions/{ours['id']}/cancel", headers=umbrella)
        assert cancel.status_code == 404
        assert (await api.http.get("/v1/predictions", headers=umbrella)).json()["results"] == []
        same_id = await api.http.put("/v1/predictions/mine", json=TEXT | {"input": {"text": "b"}}, headers=umbrella)
        assert same_id.status_code == 201
        refused = await api.http.get(paths[0])
        assert (refused.status_code, refused.json()["title"]) == (401, "Unauthenticated")


async def test_full_instance_says_when_to_come_back(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url, max_in_flight=1)) as api:
        api.worker.go.clear()
        waiting = asyncio.create_task(api.http.post("/v1/predictions", json=TEXT, headers=WAIT))
        await api.worker.until_taken(1)
        refused = await api.http.post("/v1/predictions", json=TEXT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["detail"]
        api.worker.go.set()
        assert (await waiting).json()["status"] == "succeeded"
        assert len((await api.http.get("/v1/predictions")).json()["results"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/predictions", {"input": {"text": "a"}}, 422, "version"),
        ("/v1/predictions", {"version": "gpt-9", "input": {}}, 422, "version"),
        ("/v1/predictions", {"version": IMAGE_MODEL.name, "input": {}}, 422, "input.prompt"),
        ("/v1/predictions", {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "steps": 3}}, 422, "input.steps"),
        ("/v1/predictions", {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "width": 3}}, 422, "input.size"),
        ("/v1/predictions", TEXT | {"input": {"text": "a", "texts": ["b"]}}, 422, "input"),
        ("/v1/predictions", TEXT | {"input": {"texts": ["a"] * 129}}, 422, "input.texts"),
        ("/v1/predictions", TEXT | {"webhook": "ftp://a"}, 422, "webhook"),
        ("/v1/predictions", TEXT | {"webhook_events_filter": ["end"]}, 422, "webhook_events_filter[0]"),
        ("/v1/models/a/gpt-9/predictions", {"input": {}}, 404, None),
    ],
)
async def test_wrong_requests_are_told_in_replicates_shape(
    api: ApiUnderTest, path: str, body: dict[str, Any], status: int, field: str | None
) -> None:
    response = await api.http.post(path, json=body)
    problem = response.json()
    assert response.status_code == problem["status"] == status
    assert problem["detail"]
    assert [one["field"] for one in problem.get("invalid_fields", [])] == ([field] if field else [])
    assert not api.worker.jobs


async def test_models_versions_and_paths_without_v1(api: ApiUnderTest) -> None:
    model = (await api.http.get(f"/models/anyone/{TEXT_MODEL.name}")).json()
    version = model["latest_version"]
    assert (await api.http.get(f"/v1/models/x/{TEXT_MODEL.name}/versions/{version['id']}")).json() == version
    assert (await api.http.get(f"/v1/models/x/{IMAGE_MODEL.name}/versions/{version['id']}")).status_code == 404
    assert "texts" in version["openapi_schema"]["components"]["schemas"]["Input"]["properties"]
    body = TEXT | {"version": version["id"]}
    found = (await api.http.post("/predictions", json=body, headers=WAIT)).json()
    assert (found["status"], found["version"]) == ("succeeded", version["id"])
    assert (await api.http.get(f"/predictions/{found['id']}")).json() == found


async def test_progress_shows_in_logs(api: ApiUnderTest, redis_url: str) -> None:
    api.worker.go.clear()
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a"}}
    created = (await api.http.post("/v1/predictions", json=body)).json()
    await api.worker.claimed.wait()
    async with Records(redis_url) as records:
        await records.progress(created["id"], 3, 10)
    found = (await api.http.get(f"/v1/predictions/{created['id']}")).json()
    assert found["logs"] == " 30%|███       | 3/10\n"
    api.worker.go.set()
    assert (await until_over(api, created))["logs"].startswith("100%|██████████| 10/10")
