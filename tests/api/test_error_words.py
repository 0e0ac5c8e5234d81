"""Every validation error for every request uses the caller's terms: it names a field as it was
sent, states which values are accepted, and reveals no internals.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from api.bodies import Body
from api.errors import describe, to_bad_input
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.test_generation import chat
from tests.api.test_responses import asked

pytestmark = pytest.mark.anyio
OURS = re.compile(
    r"_kind|_tag|\(\)|Input tag|instance of|[Dd]ictionary|\bdict\b|[Tt]uple|Value error|pydantic"
    r"|\bNone\b|\bTrue\b|\bFalse\b|function-|constrained|literal\[|hex escape|discriminator"
    r"|after validation|\b[A-Z][a-z]+[A-Z]\w*\b"
)
"""Names from Python, pydantic, and classes."""
PLACE = re.compile(r"[a-z_][a-z0-9_]*(\[\w+\]|\.[A-Za-z0-9_-]+)*")
TYPES = {"str", "int", "float", "bool", "list", "dict"}
ACCEPTED = re.compile(
    r"should|at most|at least|require[ds]|unknown parameter|not supported|\bsend\b|\buse\b|omit"
    r"|\bname\b|one of|either|not allowed|must|longer than"
    r"|needed|is not .+ or |expected an? "
)
"""Words that precede an accepted form."""
VALUES: list[Any] = [
    *(None, True, 5, -1, 10**12, 1.5, "x", "", "x" * 70_000),
    *([], [5], ["x"], [[]], [{}], ["x"] * 3000, {}, {"x": 1}, {"type": "x"}, {"type": 5}),
    *({"type": "function"}, {"type": "message"}, {"type": "json_schema"}, {"type": None}),
    [{"type": "x"}],
    [{"role": "x"}],
    {str(number): "x" for number in range(100)},
]


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    """All request bodies and their parts."""
    for one in kind.__subclasses__():
        yield one
        yield from bodies(one)


def flaw(where: str, reason: str) -> str:
    """An error message's flaw. Empty if the message is fine."""
    if found := OURS.search(f"{where} {reason}"):
        return f"it has a word of ours: {found[0]!r}"
    if where and (not PLACE.fullmatch(where) or TYPES & set(re.split(r"[.\[\]]", where))):
        return "it names no field as it was sent"
    if not ACCEPTED.search(reason):
        return "it does not say what is accepted"
    return ""


def errors_of(kind: type[Body], body: Any, *, strict: bool) -> list[Any]:
    try:
        kind.model_validate_json(json.dumps(body), strict=strict)
    except ValidationError as error:
        return error.errors()
    return []


@pytest.mark.slow(about_s=8)
def test_every_error_of_every_body_is_in_the_callers_words() -> None:
    kinds = [kind for kind in bodies() if kind.__module__.startswith("api.")]
    assert len(kinds) > 30
    found: dict[str, str] = {}
    for kind in kinds:
        names = [
            field.alias or getattr(field.validation_alias, "choices", [name])[0]
            for name, field in kind.model_fields.items()
        ]
        sent = [{name: value} for name in [*names, "zzz"] for value in VALUES]
        for body in [{}, *sent]:
            for strict in (True, False):
                for wrong in errors_of(kind, body, strict=strict):
                    where, reason = describe(wrong)
                    if about := flaw(where, reason):
                        found[f"{kind.__name__}: {where}: {reason[:150]}"] = about
    assert not found, "\n".join(f"{message}: {about}" for message, about in found.items())


@pytest.mark.parametrize("body", [b"{", b'{"a": "\\ud800"}', b'{"a": "\\ud8"}', b"[" * 900, b""])
def test_a_body_that_is_not_json_is_told_without_a_parsers_words(body: bytes) -> None:
    with pytest.raises(ValidationError) as raised:
        next(bodies()).model_validate_json(body)
    message = to_bad_input(raised.value).message
    assert message.startswith(("the body is not valid JSON: ", "the body is nested deeper than "))
    assert not OURS.search(message.removeprefix("the body is not valid JSON: ")), message


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any
) -> AsyncIterator[ApiUnderTest]:
    folder = tmp_path_factory.mktemp("api")
    async with running_api(settings_for(folder, redis_url=redis_server.url)) as running:
        yield running


def _operations(api: ApiUnderTest) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), re.sub(r"\{[^}]*\}", "x", path), operation


def _flaw_of_answer(answer: Any) -> str:
    if answer.status_code not in (400, 422):
        return ""
    body = answer.json()
    if "error" in body:
        message, field = body["error"]["message"], body["error"].get("param")
        where, _, reason = message.partition(": ")
        # Anthropic's format, in which only the message names the field.
        if body.get("type") == "error":
            field = where
        if field is None:
            return "" if message.startswith("the body") else "no field is named"
        if not where.startswith(field):
            return "the message does not begin with the field"
        return flaw(where, reason) if where != "the body" else ""
    if not body.get("invalid_fields"):
        return "" if body["detail"] else "it says nothing"
    first = body["invalid_fields"][0]
    return flaw(first["field"], first["description"])


async def test_every_route_refuses_what_is_wrong_in_the_callers_words(api: ApiUnderTest) -> None:
    found = []
    for method, path, operation in _operations(api):
        if "application/json" in operation.get("requestBody", {}).get("content", {}):
            wrong: list[Any] = [{}, {"zzz": 1}, [], 5]
            for body in wrong:
                answer = await api.http.request(method, path, json=body)
                assert answer.status_code < 500, (method, path, body, answer.text)
                if about := _flaw_of_answer(answer):
                    found.append(f"{method} {path} {body}: {about}: {answer.text[:300]}")
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "query" and "$ref" not in parameter:
                params = {parameter["name"]: "zzz-zzz"}
                answer = await api.http.request(method, path, params=params)
                assert answer.status_code < 500, (method, path, params, answer.text)
                if about := _flaw_of_answer(answer):
                    found.append(f"{method} {path} {params}: {about}: {answer.text[:300]}")
    assert not found, "\n".join(found)


TOOL = {"type": "function", "function": {"name": "f"}}
FLAT_TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("chat/completions", chat(stream="true"), "stream", "true or false, without quotes"),
        ("chat/completions", chat(tool_choice="required"), "tool_choice", "requires tools"),
        (
            "chat/completions",
            chat(tools=[TOOL], tool_choice=TOOL | {"function": {"name": "g"}}),
            "tool_choice",
            "'g' not found in tools",
        ),
        ("chat/completions", chat(audio={}), "audio", "is not supported"),
        ("chat/completions", chat(tool_choice={"type": "function"}), "tool_choice", "required"),
        ("chat/completions", chat(top_logprobs=2), "top_logprobs", "logprobs: true"),
        ("responses", asked(tool_choice="required"), "tool_choice", "requires tools"),
        ("responses", asked([{"type": "web_search_call"}]), "input", "type must be one of message"),
        ("responses", asked([{"role": "user"}]), "input", "input[0].content: Field required"),
        ("responses", asked([{"role": "user", "content": 5}]), "input", "input[0].content: "),
        ("responses", asked(tools=[FLAT_TOOL], tool_choice={"type": "x"}), "tool_choice", "should"),
        ("responses", asked() | {"text": {"format": {"type": "json_schema"}}}, "text", "schema"),
        ("responses", asked(stream="yes"), "stream", "true or false"),
        ("responses", asked(top_logprobs=30), "top_logprobs", "less than or equal to 20"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
async def test_an_error_is_about_the_field_that_was_sent(
    api: ApiUnderTest, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    answer = await api.http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param)
    assert reason in error["message"]
    assert not OURS.search(error["message"]), error
