"""The REST server: JSON for the same calls as gRPC. All other requests are rejected."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from google.pubsub_v1.services.publisher.transports import rest_base as publisher_rest
from google.pubsub_v1.services.schema_service.transports import rest_base as schema_rest
from google.pubsub_v1.services.subscriber.transports import rest_base as subscriber_rest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pubsub_emulator.protocols.rest_rules import RULES, Rule, find_rule
from pubsub_emulator.server import PubsubServer, serve
from tests.limits import WAIT_LIMIT_S
from tests.wire import connect, until

TOPIC = "/v1/projects/p/topics/jobs"
SUBSCRIPTION = "/v1/projects/p/subscriptions/workers"


@pytest.fixture
async def rest_server() -> AsyncIterator[PubsubServer]:
    async with serve(rest_port=0) as server:
        yield server


@pytest.fixture
async def http(rest_server: PubsubServer) -> AsyncIterator[httpx.AsyncClient]:
    assert rest_server.rest_endpoint
    async with httpx.AsyncClient(
        base_url=rest_server.rest_endpoint, timeout=WAIT_LIMIT_S
    ) as client:
        yield client


async def made(http: httpx.AsyncClient) -> None:
    """Creates the topic and the subscription."""
    assert (await http.put(TOPIC, json={})).status_code == 200
    subscription = {"topic": TOPIC.removeprefix("/v1/"), "ackDeadlineSeconds": 20}
    assert (await http.put(SUBSCRIPTION, json=subscription)).status_code == 200


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()["error"]
    assert body["code"] == response.status_code
    return body["code"], body["status"], body["message"]


def _rules_of_the_client() -> set[tuple[str, str, str, str]]:
    rules = set()
    for module in (publisher_rest, subscriber_rest, schema_rest):
        for transport in vars(module).values():
            for name, call in vars(transport).items() if isinstance(transport, type) else ():
                for option in getattr(call, "_get_http_options", list)():
                    rule = option["method"].upper(), option["uri"], option.get("body", "")
                    rules.add((name.removeprefix("_Base"), *rule))
    return rules


def test_rules_are_those_of_googles_client() -> None:
    expected = _rules_of_the_client()
    assert len(expected) > 30
    assert {(rule.call, rule.verb, rule.template, rule.body) for rule in RULES} == expected


@pytest.mark.parametrize(
    ("verb", "path", "call", "fields"),
    [
        ("GET", TOPIC, "GetTopic", {"topic": "projects/p/topics/jobs"}),
        ("PATCH", TOPIC, "UpdateTopic", {"topic.name": "projects/p/topics/jobs"}),
        (
            "GET",
            "/v1/projects/example.com:p/topics/a%2Bb",
            "GetTopic",
            {"topic": "projects/example.com:p/topics/a+b"},
        ),
        ("POST", f"{SUBSCRIPTION}:pull", "Pull", {"subscription": SUBSCRIPTION[4:]}),
        ("GET", "/v1/projects/p/topics", "ListTopics", {"project": "projects/p"}),
        (
            "GET",
            "/v1/projects/example.com:p/topics",
            "ListTopics",
            {"project": "projects/example.com:p"},
        ),
        ("GET", f"{TOPIC}:getIamPolicy", "GetIamPolicy", {"resource": TOPIC[4:]}),
    ],
)
def test_request_finds_its_call(verb: str, path: str, call: str, fields: dict[str, str]) -> None:
    match = find_rule(verb, path)
    assert match is not None
    assert (match[0].call, match[1]) == (call, fields)


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", f"{TOPIC}:publish"),
        ("POST", TOPIC),
        ("GET", f"{TOPIC}/more/parts"),
        ("GET", "/v2/projects/p/topics"),
        ("GET", "/v1/projects//topics"),
    ],
)
def test_request_for_nothing_finds_no_call(verb: str, path: str) -> None:
    assert find_rule(verb, path) is None


@pytest.mark.anyio
async def test_message_is_published_pulled_and_acked(http: httpx.AsyncClient) -> None:
    await made(http)
    message = {"data": encoded("hello"), "attributes": {"k": "v"}}
    published = await http.post(f"{TOPIC}:publish", json={"messages": [message]})
    pulled = (await http.post(f"{SUBSCRIPTION}:pull", json={"maxMessages": 5})).json()
    (received,) = pulled["receivedMessages"]
    assert received["message"]["data"] == encoded("hello")
    assert received["message"]["attributes"] == {"k": "v"}
    assert published.json() == {"messageIds": [received["message"]["messageId"]]}
    acked = await http.post(f"{SUBSCRIPTION}:acknowledge", json={"ackIds": [received["ackId"]]})
    assert acked.json() == {}
    nothing = {"maxMessages": 5, "returnImmediately": True}
    assert (await http.post(f"{SUBSCRIPTION}:pull", json=nothing)).json() == {}


@pytest.mark.anyio
async def test_both_protocols_lead_to_the_same_broker(
    rest_server: PubsubServer, http: httpx.AsyncClient
) -> None:
    await made(http)
    async with connect(rest_server.endpoint) as wire:
        await wire.publish("projects/p/topics/jobs", "by gRPC")
    pulled = (await http.post(f"{SUBSCRIPTION}:pull", json={"maxMessages": 1})).json()
    assert pulled["receivedMessages"][0]["message"]["data"] == encoded("by gRPC")


@pytest.mark.anyio
@pytest.mark.parametrize("mask", ["ackDeadlineSeconds,labels", "ack_deadline_seconds,labels"])
async def test_update_takes_both_spellings_of_a_mask(http: httpx.AsyncClient, mask: str) -> None:
    await made(http)
    changed = {"subscription": {"ackDeadlineSeconds": 60, "labels": {"a": "b"}}}
    response = await http.patch(SUBSCRIPTION, json={**changed, "updateMask": mask})
    assert response.json()["ackDeadlineSeconds"] == 60
    assert response.json()["labels"] == {"a": "b"}


@pytest.mark.anyio
async def test_list_is_paged_by_query(http: httpx.AsyncClient) -> None:
    for number in range(3):
        await http.put(f"/v1/projects/p/topics/topic-{number}", json={})
    query = {"pageSize": "2", "alt": "json", "$.xgafv": "1", "prettyPrint": "true"}
    first = (await http.get("/v1/projects/p/topics", params=query)).json()
    query["pageToken"] = first["nextPageToken"]
    second = (await http.get("/v1/projects/p/topics", params=query)).json()
    names = [topic["name"] for topic in first["topics"] + second["topics"]]
    assert names == [f"projects/p/topics/topic-{number}" for number in range(3)]


@pytest.mark.anyio
async def test_nested_field_comes_by_query(http: httpx.AsyncClient) -> None:
    await made(http)
    version = {"options.requestedPolicyVersion": "3"}
    assert (await http.get(f"{TOPIC}:getIamPolicy", params=version)).status_code == 200
    version = {"options.requestedPolicyVersion": "2"}
    code, status, message = error(await http.get(f"{TOPIC}:getIamPolicy", params=version))
    assert (code, status) == (400, "INVALID_ARGUMENT")
    assert "requested_policy_version" in message


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "must be an object"),
        ('{"nope": 1}', '"nope"'),
        ('{"labels": [1]}', "labels"),
        ('{"labels": {"a": 1}}', "labels"),
        ('{"labels": {"a": "\\ud800"}}', "surrogates"),
        ('{"\\uDC00": 1}', "surrogates"),
        ('{"messageRetentionDuration": "x"}', "messageRetentionDuration"),
        ('{"messageRetentionDuration": NaN}', "NaN is not valid JSON"),
        ('{"kmsKeyName": 1}', "kmsKeyName"),
        ('{"labels": {"a": ' + "9" * 5000 + "}}", "digits"),
        ("[" * 100_000, "nested too deeply"),
        ('{"ingestionDataSourceSettings": {}}', "ingestion_data_source_settings"),
        ("\xff", "JSON"),
    ],
)
async def test_malformed_body_is_refused_with_the_reason(
    http: httpx.AsyncClient, body: str, reason: str
) -> None:
    refusal = await http.put(TOPIC, content=body.encode("latin-1"))
    code, status, message = error(refusal)
    assert (code, status) in ((400, "INVALID_ARGUMENT"), (501, "UNIMPLEMENTED"))
    assert reason in message


@pytest.mark.anyio
@pytest.mark.parametrize(
    "query", ["pageSize=abc", "pageSize=1&pageSize=2", "nope=1", "project.x=1", "pageSize.x=1"]
)
async def test_malformed_query_is_refused_with_its_name(
    http: httpx.AsyncClient, query: str
) -> None:
    code, _, message = error(await http.get(f"/v1/projects/p/topics?{query}"))
    assert code == 400
    assert query.partition("=")[0].partition(".")[0] in message


@pytest.mark.anyio
async def test_list_in_the_query_does_not_add_to_a_text_in_the_body(
    http: httpx.AsyncClient,
) -> None:
    await made(http)
    refusal = await http.post(f"{SUBSCRIPTION}:acknowledge?ackIds=a", json={"ackIds": "b"})
    assert error(refusal)[:2] == (400, "INVALID_ARGUMENT")
    assert '"ackIds" is specified twice' in error(refusal)[2]


@pytest.mark.anyio
async def test_refusals_have_googles_codes(http: httpx.AsyncClient) -> None:
    assert error(await http.get(TOPIC))[:2] == (404, "NOT_FOUND")
    await made(http)
    assert error(await http.put(TOPIC, json={}))[:2] == (409, "ALREADY_EXISTS")
    policy = {"policy": {"etag": encoded("old")}}
    assert error(await http.post(f"{TOPIC}:setIamPolicy", json=policy))[:2] == (409, "ABORTED")
    assert error(await http.get("/v1/nothing"))[:2] == (404, "NOT_FOUND")


@pytest.mark.anyio
async def test_refused_ack_ids_come_with_their_reasons(http: httpx.AsyncClient) -> None:
    await http.put(TOPIC, json={})
    fields = {"topic": TOPIC.removeprefix("/v1/"), "enableExactlyOnceDelivery": True}
    await http.put(SUBSCRIPTION, json=fields)
    response = await http.post(f"{SUBSCRIPTION}:acknowledge", json={"ackIds": ["gone"]})
    (details,) = response.json()["error"]["details"]
    assert details["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"
    assert details["metadata"] == {"gone": "PERMANENT_FAILURE_INVALID_ACK_ID"}


@pytest.mark.anyio
async def test_body_above_the_limit_is_refused(http: httpx.AsyncClient) -> None:
    await made(http)
    big = {"messages": [{"data": "A" * 17 * 1024**2}]}
    code, _, message = error(await http.post(f"{TOPIC}:publish", json=big))
    assert code == 400
    assert "Request payload size" in message
    large = {"messages": [{"data": "A" * 1024**2}]}
    assert (await http.post(f"{TOPIC}:publish", json=large)).status_code == 200


@pytest.mark.anyio
async def test_pull_that_hangs_up_takes_no_message(
    rest_server: PubsubServer, http: httpx.AsyncClient
) -> None:
    await made(http)
    backlog = rest_server.broker.registry.subscriptions[SUBSCRIPTION[4:]].backlog
    waiting = asyncio.create_task(http.post(f"{SUBSCRIPTION}:pull", json={"maxMessages": 1}))
    await until(lambda: len(backlog.consumers) == 1)
    waiting.cancel()
    await until(lambda: len(backlog.consumers) == 0)
    await http.post(f"{TOPIC}:publish", json={"messages": [{"data": encoded("a")}]})
    pulled = (await http.post(f"{SUBSCRIPTION}:pull", json={"maxMessages": 1})).json()
    assert len(pulled["receivedMessages"]) == 1


@pytest.mark.anyio
async def test_waiting_pull_ends_with_the_server() -> None:
    async with httpx.AsyncClient(timeout=WAIT_LIMIT_S) as http:
        async with serve(rest_port=0) as server:
            assert server.rest_endpoint
            http.base_url = httpx.URL(server.rest_endpoint)
            await made(http)
            backlog = server.broker.registry.subscriptions[SUBSCRIPTION[4:]].backlog
            pull = asyncio.create_task(http.post(f"{SUBSCRIPTION}:pull", json={"maxMessages": 1}))
            await until(lambda: len(backlog.consumers) == 1)
        assert error(await pull)[:2] == (503, "UNAVAILABLE")


@pytest.mark.anyio
async def test_taken_rest_port_is_an_error_with_the_address(rest_server: PubsubServer) -> None:
    with pytest.raises(OSError, match=f"can't listen on 127.0.0.1:{rest_server.rest_port}"):
        async with serve(rest_port=rest_server.rest_port):
            pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "name", "topic", "labels", "messages", "data", "attributes", "ackIds", "policy",
                    "subscription", "updateMask", "time", "snapshot", "pushConfig", "bindings",
                    "ackDeadlineSeconds", "messageRetentionDuration", "maxMessages", "expireTime",
                    "expirationPolicy", "ttl", "retryPolicy", "filter", "etag", "permissions",
                    "schema", "type", "definition", "encoding", "message", "revisionId", "parent",
                    "schemaSettings", "returnImmediately", "tags", "pushEndpoint", "noWrapper",
                    "paths",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip


queries = st.dictionaries(
    st.sampled_from(
        [
            "pageSize",
            "pageToken",
            "schemaId",
            "view",
            "schema.type",
            "topic.name",
            "options",
            "a.b",
            "force",
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=4),
    max_size=2,
)


@pytest.mark.anyio
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rule=st.sampled_from(RULES), body=json_values, query=queries)
async def test_no_body_is_a_failure_of_the_server(
    http: httpx.AsyncClient, rule: Rule, body: Any, query: dict[str, str]
) -> None:
    path = rule.template.partition("{")[0] + rule.template.partition("=")[2].replace("}", "")
    path = path.replace("projects/*", "projects/p").replace("/*", "/workers")
    if rule.call == "Pull" and isinstance(body, dict):
        body["returnImmediately"] = True
    content = json.dumps(body).encode()
    response = await http.request(rule.verb, path, params=query, content=content)
    assert response.status_code in (200, 400, 404, 409, 501), response.text
