"""A tenant with many predictions from many models."""

import asyncio
import itertools
from uuid import uuid4

import msgspec

from shared.messages import encode_reply_body
from shared.models.catalog import Catalog, Model
from shared.predictions import Prediction, decode_document, encode_document
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, WRITER, ApiUnderTest
from tests.api.predicting import WAIT
from tests.record_stores import RecordStores

MODELS, PREDICTIONS = 50, 10_000
KEEP_S = 3600
_AT_ONCE = 200
_INPUTS = {
    TEXT_MODEL.name: {"texts": ["How do I reset my password?"]},
    IMAGE_MODEL.name: {"prompt": "a circle"},
    WRITER.name: {"prompt": "Summarize the call. " * 20},
}


def _crowd() -> list[Model]:
    kinds = itertools.cycle((TEXT_MODEL, WRITER, IMAGE_MODEL))
    first = [TEXT_MODEL, WRITER, IMAGE_MODEL]
    copies = (
        model.model_copy(update={"name": f"{model.name}-of-team-{number:02}", "aliases": ()})
        for number, model in zip(range(MODELS - len(first)), kinds, strict=False)
    )
    return [*first, *copies]


CROWD = Catalog(tuple(_crowd()))
"""50 models of three kinds."""


async def store_predictions(api: ApiUnderTest, redis_url: str, tenant: str) -> None:
    """Stores PREDICTIONS from all models, one per second, with the results of the first three."""
    done = {}
    async with RecordStores(redis_url) as stores:
        for model, given in _INPUTS.items():
            body = {"version": model, "input": given}
            answer = await api.http.post("/v1/predictions", json=body, headers=WAIT)
            assert answer.json()["status"] == "succeeded", answer.text
            record = await stores.records.read(answer.json()["id"])
            assert record is not None
            assert record.reply is not None
            done[model] = decode_document(record.document), encode_reply_body(record.reply)

        async def keep(number: int) -> None:
            model = CROWD.models[number % MODELS]
            kind = next(name for name in _INPUTS if model.name.startswith(name))
            document, reply = done[kind]
            copied = _copy(document, model.name, document.created_at_s - number - 1)
            assert await stores.predictions.keep(
                copied.record,
                tenant,
                encode_document(copied),
                reply,
                created_at_s=copied.created_at_s,
                keep_s=KEEP_S,
            )

        copies = range(PREDICTIONS - len(done))
        for start in range(0, len(copies), _AT_ONCE):
            await asyncio.gather(*map(keep, copies[start : start + _AT_ONCE]))


def _copy(document: Prediction, model: str, created_at_s: float) -> Prediction:
    name = uuid4().hex
    return msgspec.structs.replace(
        document, id=name, record=name, model=model, version=model, created_at_s=created_at_s
    )
