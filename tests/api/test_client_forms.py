"""Every field of every form in the installed `openai` client: empty, absent, and a typical value.

The client leaves nulls out of a form. In a handwritten form, null is an empty value, which is
either treated as null or rejected. Any other value is either accepted or rejected with the field's
name.
"""

import base64
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
from openai._qs import Querystring
from openai.types import file_create_params, image_edit_params

from tests.api.client_fields import Field, params_of
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.test_client_fields import WHITE

pytestmark = pytest.mark.anyio
FORM = Querystring(array_format="brackets")
"""Encoded as the client encodes its forms."""
PNG = base64.b64decode(WHITE.partition(",")[2])


class Case(NamedTuple):
    """A route that accepts a form: its files, its fields, and the client's types."""

    path: str
    files: list[tuple[str, tuple[str, bytes]]]
    fields: dict[str, str]
    kinds: tuple[Any, ...]


CASES = [
    Case(
        "/v1/files",
        [("file", ("a.jsonl", b"{}\n"))],
        {"purpose": "batch"},
        (file_create_params.FileCreateParams,),
    ),
    Case(
        "/v1/images/edits",
        [("image", ("a.png", PNG))],
        {"prompt": "a", "size": "64x64"},
        (image_edit_params.ImageEditParamsNonStreaming, image_edit_params.ImageEditParamsBase),
    ),
    Case(
        "/v1/images/edits",
        [("image[]", ("a.png", PNG))],
        {"prompt": "a", "size": "64x64"},
        (image_edit_params.ImageEditParamsStreaming,),
    ),
]
FILES = {"file", "image", "mask", "markup"}


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any
) -> AsyncIterator[ApiUnderTest]:
    folder = tmp_path_factory.mktemp("api")
    async with running_api(settings_for(folder, redis_url=redis_server.url)) as running:
        yield running


async def _sent(api: ApiUnderTest, case: Case, given: dict[str, Any]) -> httpx.Response:
    written = [pair for pair in case.fields.items() if pair[0] not in given]
    written += FORM.stringify_items({name: one for name, one in given.items() if name not in FILES})
    files = [*case.files, *((name, ("b.png", PNG)) for name in given if name in FILES)]
    # Fields as files without a name: httpx's `data` accepts each name only once.
    parts: list[Any] = [(name, (None, value)) for name, value in written]
    return await api.http.post(case.path, files=[*parts, *files])


def _is_well_refused(answer: httpx.Response, field: Field) -> bool:
    """True if the rejection includes the field's name and a reason."""
    if answer.status_code not in (400, 404):
        return False
    error = answer.json()["error"]
    is_named = str(error["param"]).partition("[")[0].partition(".")[0] == field.name
    has_reason = len(error["message"]) > len(field.name) + len("unknown")
    return is_named and field.name in error["message"] and has_reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.path}:{case.kinds[0].__name__}")
async def test_each_field_of_the_client_is_taken_or_refused_by_name(
    api: ApiUnderTest, case: Case
) -> None:
    plain = await _sent(api, case, {})
    assert plain.status_code == 200, plain.text
    found: list[str] = []
    for field in params_of(*case.kinds):
        if field.name in ("file", "image"):
            continue
        answer = await _sent(api, case, {field.name: field.usual})
        if answer.status_code != 200 and not _is_well_refused(answer, field):
            found.append(f"{field.name}: {field.usual!r} is {answer.status_code}: {answer.text}")
        if field.name in FILES:
            continue
        answer = await _sent(api, case, {field.name: ""})
        is_refused = field.is_required and _is_well_refused(answer, field)
        if answer.status_code != 200 and not is_refused:
            found.append(f"{field.name}: empty is {answer.status_code}: {answer.text}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("markup", "is not supported"),
        ("photo", "unknown parameter"),
        ("prompt", "must not be a file"),
    ],
)
async def test_a_file_in_another_field_is_refused_for_what_it_is(
    api: ApiUnderTest, name: str, reason: str
) -> None:
    fields: list[Any] = [(key, (None, one)) for key, one in CASES[1].fields.items() if key != name]
    files = [*fields, *CASES[1].files, (name, ("b.png", PNG))]
    answer = await api.http.post("/v1/images/edits", files=files)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(f"{name}: ")
    assert reason in error["message"]


async def test_what_the_client_sends_as_null_is_left_out(api: ApiUnderTest) -> None:
    """Calls the client itself, with each optional field set to null."""
    client = api.openai()
    nulls: dict[str, Any] = {
        field.name: None
        for field in params_of(*CASES[1].kinds)
        if field.is_nullable and field.name not in ("svg", "frame_count", "frame_duration_ms")
    }
    drawn = await client.images.edit(image=PNG, prompt="a", extra_body=nulls)
    assert drawn.data
    drawn = await client.images.edit(image=[PNG], prompt="a", n=1, size="64x64")
    assert drawn.data
    kept = await client.files.create(
        file=("a.jsonl", b"{}\n"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert kept.expires_at == kept.created_at + 3600
