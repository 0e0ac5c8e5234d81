"""Splits a document into pages, each a separate document: the first step of a flow.

Identical pages have identical bytes no matter which document they come from, so when a model reads
pages, its results for repeated pages come from the cache.
"""

from __future__ import annotations

from pathlib import Path as LocalPath

from cog import BaseModel, BasePredictor, Input, Path
from document import divided


class Output(BaseModel):
    """The pages of a document, in order.

    `pages`: each is a separate document. `numbers`: page numbers in the document, from 0.
    `size_bytes`: size of the document.
    """

    pages: list[Path]
    numbers: list[int]
    size_bytes: int


class Predictor(BasePredictor):
    """Splits documents."""

    def predict(
        self,
        document: Path = Input(description="PDF, PNG, JPEG, TIFF or WebP."),
        pages: str = Input(
            description="Page numbers, counted from 0, such as `0,2-4`. Empty: all.", default=""
        ),
    ) -> Output:
        """Returns each page as a file."""
        path = LocalPath(document)
        parts = list(divided(path, LocalPath.cwd(), pages))
        return Output(
            pages=[Path(page) for _, page in parts],
            numbers=[number for number, _ in parts],
            size_bytes=path.stat().st_size,
        )
