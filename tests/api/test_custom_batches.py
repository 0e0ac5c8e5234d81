"""Classes with `predict_batch` behind the API: the queue forms their batches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api.predicting import WAIT, until_over, until_processing
from tests.api.serving_classes import predict

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=20)]

BATCHES = """
class Given(BaseModel):
    text: str = Input(min_length=1)
    language: str = Input(default="en")
    mode: str = Input(default="say", choices=["say", "fail", "raise", "hold", "loop"])

class Predictor(BasePredictor):
    def predict_batch(self, inputs: list[Given]) -> list[dict]:
        modes = {one.mode for one in inputs}
        if "raise" in modes:
            raise RuntimeError("not with these")
        if "hold" in modes:
            time.sleep(0.5)
        while "loop" in modes:
            time.sleep(0.01)
        facts = {"items": len(inputs), "languages": len({one.language for one in inputs})}
        return [
            ValueError(f"not {one.text}") if one.mode == "fail" else {"text": one.text, **facts}
            for one in inputs
        ]
"""


async def all_of(api: Any, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The predictions for inputs that arrived while another batch was running."""
    holding = asyncio.create_task(predict(api, text="first", mode="hold"))
    await until_processing(api)
    found = await asyncio.gather(*(predict(api, **one) for one in given))
    await holding
    return list(found)


async def test_the_queue_forms_batches(serve: Any) -> None:
    api = await serve(BATCHES, batch={"max_items": 8})
    found = await all_of(api, [{"text": str(number)} for number in range(8)])
    assert [one["output"]["text"] for one in found] == list("01234567")
    assert max(one["output"]["items"] for one in found) > 1
    assert len(api.rows) == 9
    assert {row.cost_usd for row in api.rows} == {0.25}


async def test_only_equal_values_of_the_key_share_a_batch(serve: Any) -> None:
    api = await serve(BATCHES, batch={"max_items": 8, "key": "language"})
    given = [{"text": str(number), "language": ["en", "de"][number % 2]} for number in range(8)]
    found = await all_of(api, given)
    assert {one["output"]["languages"] for one in found} == {1}
    assert max(one["output"]["items"] for one in found) > 1


async def test_a_bad_item_fails_alone_and_costs_nothing(serve: Any) -> None:
    api = await serve(BATCHES, batch={"max_items": 8})
    given: list[dict[str, Any]] = [{"text": str(number)} for number in range(7)]
    given[2]["mode"], given[4]["mode"] = "fail", "raise"
    found = await all_of(api, given)
    assert [one["status"] == "failed" for one in found] == [at in (2, 4) for at in range(7)]
    assert (found[2]["error"], found[4]["error"]) == (
        "ValueError: not 2",
        "RuntimeError: not with these",
    )
    assert found[2]["logs"] == "ValueError: not 2\n"
    assert "RuntimeError: not with these" in found[4]["logs"]
    assert sum(row.cost_usd for row in api.rows) == 6 * 0.25


async def test_a_canceled_batch_makes_room_for_the_next(serve: Any) -> None:
    api = await serve(BATCHES, batch={"max_items": 8})
    body = {"version": "mine", "input": {"text": "a", "mode": "loop"}}
    running = (await api.http.post("/v1/predictions", json=body)).json()
    late = await api.http.post("/v1/predictions", json=body, headers=WAIT | {"cancel-after": "5s"})
    await api.http.post(f"/v1/predictions/{running['id']}/cancel")
    assert (await until_over(api, running))["status"] == "canceled"
    assert "deadline" in (await until_over(api, late.json()))["error"]
    assert (await predict(api, text="b"))["output"]["text"] == "b"
