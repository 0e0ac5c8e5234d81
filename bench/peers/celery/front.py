"""Celery, HTTP side: a FastAPI endpoint that sends a task and waits for its result."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,attr-defined"

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel
from tasks import embed as embed_task

TIMEOUT_S = 300
app = FastAPI()


class FrontText(BaseModel):
    """One text to embed."""

    text: str


@app.post("/embed")
def embed(params: FrontText) -> list[float]:
    vector: list[float] = embed_task.delay(params.text).get(timeout=TIMEOUT_S)
    return vector
