"""Predictions with similarity models: one query and several texts, or pairs of texts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.bodies import Body, Text
from api.inputs.source_images import ImageCaller, SourceImages
from api.tasks.base import ApiTask, Inputs
from api.tasks.embedding import check_texts
from shared.errors import InputTooLarge
from shared.models.catalog import Model
from shared.models.tasks.similarity import SimilarityInput

Pair = Annotated[list[Text], Field(min_length=2, max_length=2)]


class TextsToCompare(Body):
    """Input for similarity models: `query` and `texts`, or `pairs`."""

    query: Text | None = Field(None, description="The text that each of `texts` is compared with.")
    texts: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Texts to compare. The output has a score for each."
    )
    pairs: Annotated[list[Pair], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Pairs of texts. The output has a score for each."
    )
    truncate: Literal["end", "start"] | None = Field(
        None, description="The side of an overlong text to cut. Without it, the prediction fails."
    )

    @model_validator(mode="after")
    def _check_one_form(self) -> TextsToCompare:
        if (self.query is None) != (self.texts is None) or (self.texts is None) == (
            self.pairs is None
        ):
            raise ValueError("send either query and texts, or pairs")
        return self

    def list_pairs(self) -> list[tuple[str, str]]:
        """Returns each text along with the text it is compared to."""
        if self.pairs is not None:
            return [(text, query) for text, query in self.pairs]
        return [(text, self.query or "") for text in self.texts or ()]


class SimilarityApi(ApiTask):
    """The output is a list of cosine similarities."""

    input_schema = TextsToCompare
    output_schema: ClassVar = {
        "type": "array",
        "items": {"type": "number", "minimum": -1, "maximum": 1},
    }

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one item per pair."""
        parsed = TextsToCompare.model_validate(raw_input, strict=True)
        pairs, limit = parsed.list_pairs(), model.text.max_input_bytes
        field = "texts" if parsed.pairs is None else "pairs"
        for index, pair in enumerate(pairs):
            if any(len(text.encode()) > limit for text in pair):
                raise InputTooLarge(
                    f"{field}: pair {index} has a text that exceeds the maximum of {limit} bytes",
                    field=field,
                )
        check_texts([text + query for text, query in pairs], field)
        inputs = [SimilarityInput(text, query, parsed.truncate or "none") for text, query in pairs]
        return Inputs(inputs, raw_input, is_list=True, is_repeatable=True)


TASK = SimilarityApi()
