"""JSON over 1 MiB in class inputs and outputs goes through the object store."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.predicting import WAIT
from tests.api.serving_classes import predict

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=15)]

MIB = 1024 * 1024
CLASS = """
class Predictor(BasePredictor):
    def predict(
        self, given: dict = {}, words: list[str] = [], size: int = 0, has_file: bool = False
    ) -> dict:
        said = {"keys": sorted(given), "words": len(words), "text": "ü" * size}
        if has_file:
            path = Path(os.environ["TMPDIR"]) / "own.txt"
            path.write_text("a file")
            said["files"] = [path]
        return said
"""


async def test_a_large_output_is_in_the_prediction(serve: Any) -> None:
    api = await serve(CLASS)
    found = await predict(api, size=3 * MIB, has_file=True)
    assert found["status"] == "succeeded", found["error"]
    assert found["output"]["text"] == "ü" * (3 * MIB)
    assert found["output"]["files"] == ["data:text/plain;base64,YSBmaWxl"]
    answer = await api.http.get("/v1/predictions")
    assert len(answer.content) < 10_000
    link = answer.json()["results"][0]["output"]
    assert (await api.http.get(link)).json()["text"] == "ü" * (3 * MIB)
    (row,) = api.rows
    assert row.cost_usd == 0.25


async def test_an_answer_that_waited_has_a_large_output(serve: Any) -> None:
    api = await serve(CLASS)
    body = {"version": "mine", "input": {"size": MIB}}
    answer = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    assert len(answer.json()["output"]["text"]) == MIB


async def test_large_inputs_reach_the_class_and_are_shown_as_links(serve: Any) -> None:
    api = await serve(CLASS)
    given = {"b": "x" * (5 * MIB), "a": None}
    found = await predict(api, given=given, words=["several"] * 3)
    assert found["output"] == {"keys": ["a", "b"], "words": 3, "text": ""}
    assert found["input"]["words"] == ["several"] * 3
    file = (await api.http.get(found["input"]["given"])).json()
    assert (await api.http.get(file["urls"]["download"])).json() == given


async def test_json_above_the_bounds_is_refused_with_them(serve: Any) -> None:
    api = await serve(CLASS)
    too_long = {"version": "mine", "input": {"given": {"a": "x" * (16 * MIB)}}}
    refused = await api.http.post("/v1/predictions", json=too_long)
    assert refused.status_code == 422
    assert "16777216 bytes" in refused.json()["detail"]
    failed = await predict(api, size=8 * MIB)
    assert failed["status"] == "failed"
    assert failed["error"] == "output: must be at most 16777216 bytes of JSON"


async def test_context_of_a_prediction_reaches_the_class(serve: Any) -> None:
    body = """
    class Predictor(BasePredictor):
        def predict(self, text: str) -> dict:
            return {"text": text, "context": current_scope().context}
    """
    api = await serve(body)
    asked = {"version": "mine", "input": {"text": "a"}}
    for context in ({"trace": "1"}, {}):
        answer = await api.http.post(
            "/v1/predictions", json={**asked, "context": context}, headers=WAIT
        )
        assert answer.json()["output"] == {"text": "a", "context": context}
    wrong = await api.http.post("/v1/predictions", json={**asked, "context": {"trace": 1}})
    assert wrong.status_code == 422
    assert "context.trace" in wrong.text
    many = {f"a{number}": "x" for number in range(65)}
    refused = await api.http.post("/v1/predictions", json={**asked, "context": many}, headers=WAIT)
    assert "at most 64" in refused.text


async def test_values_that_json_cannot_carry_are_refused(serve: Any) -> None:
    api = await serve(CLASS)
    headers = {"content-type": "application/json"}
    for value, reason in ((b'"\\ud83d"', "Invalid JSON"), (b"36893488147419103232", "64 bits")):
        written = b'{"version": "mine", "input": {"given": {"a": %s}}}' % value
        refused = await api.http.post("/v1/predictions", content=written, headers=headers)
        assert refused.status_code == 422, refused.text
        assert reason in refused.text
