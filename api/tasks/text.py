"""Predictions with text models: a prompt or messages, and the generated text."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from api.bodies import MAX_SEED, Body, Text
from api.chat_bodies import Message, Share, Stop
from api.inputs.source_images import ImageCaller, SourceImages
from api.tasks.base import ApiTask, Inputs, StreamKind
from shared.errors import BadInput
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationInput, is_sampling_repeatable


class PromptToContinue(Body):
    """Input for text models: `prompt`, or `messages` with the model's chat template."""

    prompt: Text | None = Field(None, description="The text to continue.")
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="The conversation to continue, as in /v1/chat/completions."
    )
    max_tokens: int | None = Field(None, ge=1, description="Maximum number of generated tokens.")
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = Field(
        1.0, description="0 always selects the most likely token."
    )
    top_p: Share = 1.0
    top_k: int = Field(
        0, ge=0, le=2**20, description="Number of most likely tokens to sample from. 0: all tokens."
    )
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: Annotated[list[Stop], Field(max_length=4)] | None = None

    @model_validator(mode="after")
    def _check_one_form(self) -> PromptToContinue:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class GenerationApi(ApiTask):
    """The output is a string."""

    input_schema = PromptToContinue
    output_schema: ClassVar = {"type": "string"}

    def input_schema_of(self, model: Model) -> dict[str, Any]:
        """Returns the input schema, including the model's default and maximum lengths."""
        schema = super().input_schema_of(model)
        length = schema["properties"]["max_tokens"]
        length["default"] = model.generation.default_tokens
        length["anyOf"][0]["maximum"] = model.generation.longest_tokens
        return schema

    def streams(self, model: Model) -> StreamKind:
        return "text"

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        parsed = PromptToContinue.model_validate(raw_input, strict=True)
        limits = model.generation
        if parsed.max_tokens is not None and parsed.max_tokens > limits.longest_tokens:
            raise BadInput(
                f"max_tokens: must be at most {limits.longest_tokens} for {model.name}",
                field="max_tokens",
            )
        repeats = is_sampling_repeatable(parsed.seed, parsed.temperature, parsed.top_p)
        seed = parsed.seed if parsed.seed is not None else 0
        prompt = GenerationInput(
            max_tokens=parsed.max_tokens or limits.default_tokens,
            seed=seed if repeats else secrets.randbelow(MAX_SEED),
            ends_with_context=parsed.max_tokens is None,
            messages=[message.to_template() for message in parsed.messages or ()],
            prompt=parsed.prompt or "",
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            stop=list(parsed.stop or ()),
            # Anyone who has a prediction's link may read its stream.
            is_streamed=True,
        )
        prompt.check_length(limits.context_tokens)
        return Inputs(
            [prompt], _drop_unused_fields(raw_input), is_list=False, is_repeatable=repeats
        )


def _drop_unused_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the input as stored, without fields that have no effect."""
    if not fields.get("messages"):
        return fields
    messages = [
        {name: value for name, value in message.items() if name != "annotations"}
        for message in fields["messages"]
    ]
    return fields | {"messages": messages}


TASK = GenerationApi()
