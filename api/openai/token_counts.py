"""Counts tokens as a text model would: /v1/responses/input_tokens and /v1/tokenize.

One of the model's workers does the counting, because only workers have its tokenizer and chat
template. The model does not run, and counting is free.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field, model_validator
from starlette.responses import Response

from api.bodies import Body, Off, On, Option
from api.chat_bodies import ChatBody, Message, Tool
from api.errors import WrongField
from api.http.call import ModelCall
from api.http.encode_json import encode_json
from api.http.inference import Inference
from api.http.recording import Recording
from api.http.router import Router
from api.openai.generation import tools_of
from api.openai.responses import PrecedingItems, words_of_responses
from api.openai.responses_schemas import ResponseBody
from api.predictions.conversations import Conversations
from api.predictions.service import Predictions
from api.tasks.base import check_results
from shared.models.catalog import Catalog, Model
from shared.models.tasks.text import PromptToCount, TokenCount

router = Router(scope="text")


class InputTokensBody(ResponseBody):
    """A response request whose input tokens are counted."""

    personality: Option | None = Field(None, description="Accepted, without effect.")


class InputTokensReply(msgspec.Struct):
    """Number of tokens the model would read."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class TokenizeBody(Body):
    """A string of text, or a chat's messages."""

    model: str | None = Field(None, description="Default: the first text model in the catalog.")
    prompt: str | None = Field(None, description="Text to tokenize, without a chat template.")
    messages: list[Message] | None = Field(None, min_length=1, max_length=2048)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_special_tokens: On | None = None
    add_generation_prompt: On | None = None
    return_token_strs: Off | None = None

    @model_validator(mode="after")
    def _check_one_form(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise WrongField("prompt", "send either prompt or messages")
        return self


class TokenizeReply(msgspec.Struct):
    """The token IDs, the number of tokens, and the model's maximum number of input tokens."""

    count: int
    tokens: list[int]
    max_model_len: int


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the input of a response",
    body=InputTokensBody,
    reply=InputTokensReply,
)
async def count_input_tokens(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    predictions: Predictions,
    conversations: Conversations,
) -> Response:
    """Counts the tokens that the same request would use, including everything before its input."""
    preceding = PrecedingItems(call, catalog, recording, predictions, conversations)
    body = (await preceding.complete(await call.read_json(InputTokensBody))).body
    with words_of_responses():
        token_count = await count_chat(call, body.to_chat(), catalog, inference)
    return encode_json(InputTokensReply(token_count.count))


@router.post(
    "/v1/tokenize",
    summary="Tokenize a text or a chat",
    body=TokenizeBody,
    reply=TokenizeReply,
)
async def tokenize(call: ModelCall, catalog: Catalog, inference: Inference) -> Response:
    """Extension, as in vLLM: returns the IDs of the tokens the model would read."""
    body = await call.read_json(TokenizeBody)
    model = _model_of(call, body.model, catalog)
    prompt = PromptToCount(prompt=body.prompt or "", wants_ids=True)
    if body.messages is not None:
        prompt.messages = [message.to_template() for message in body.messages]
        prompt.tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    token_count = await count(call, model, prompt, inference)
    reply = TokenizeReply(token_count.count, token_count.token_ids, model.generation.context_tokens)
    return encode_json(reply)


async def count_chat(
    call: ModelCall, chat: ChatBody, catalog: Catalog, inference: Inference
) -> TokenCount:
    """Returns the number of tokens in a chat.

    Raises:
        UnknownModel: the text model does not exist.
        PenstockError: raised for the same reasons as for a chat request.
    """
    messages = [message.to_template() for message in chat.messages]
    prompt = PromptToCount(messages=messages, tools=tools_of(chat))
    return await count(call, _model_of(call, chat.model, catalog), prompt, inference)


async def count(
    call: ModelCall, model: Model, prompt: PromptToCount, inference: Inference
) -> TokenCount:
    """Counts tokens on one of the model's workers."""
    call.context.facts.price_share = 0.0
    async with inference.compute(call, model, [prompt], is_repeatable=False) as response:
        (token_count,) = check_results([response.outcomes[0].result], TokenCount, model)
        return token_count


def _model_of(call: ModelCall, name: str | None, catalog: Catalog) -> Model:
    model = catalog.default("text") if name is None else catalog.find(name, "text")
    call.use(model)
    return model
