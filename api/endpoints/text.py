"""Chat completions and completions in OpenAI's shape: from a body to inputs, and to a reply."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from api.endpoints.base import Endpoint, LineRequest, ReplyTools
from api.endpoints.tool_calls import call_schema, read_tool_calls
from api.schemas.openai_text import (
    CalledTool,
    ChatBody,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    PromptDetails,
    ShownLogprob,
    ShownTokenLogprob,
    TextUsage,
)
from shared.catalog import Catalog, Model
from shared.errors import BadInput, InputTooLarge, PenstockError
from shared.messages import ItemOutcome
from shared.tasks.text import GenerationInput, GenerationResult, TokenLogprob

TextBody = ChatBody | CompletionBody
LARGEST_SEED = 2**53
_REPLY_BYTES = 512


class ChatEndpoint(Endpoint):
    """Lines whose body is that of POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """One item for each of n answers."""
        return _line(ChatBody.model_validate_json(data, strict=True), catalog, default_seed)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """The answers."""
        body = cast(ChatBody, request.body)
        made = f"line-{time.time_ns():x}"
        return msgspec.json.encode(chat_reply(body, made, time.time(), request.model, outcomes))


class CompletionEndpoint(Endpoint):
    """Lines whose body is that of POST /v1/completions."""

    path = "/v1/completions"

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """One item for each of n texts of each prompt."""
        return _line(CompletionBody.model_validate_json(data, strict=True), catalog, default_seed)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """The texts."""
        body = cast(CompletionBody, request.body)
        made = f"line-{time.time_ns():x}"
        return msgspec.json.encode(
            completion_reply(body, made, time.time(), request.model, outcomes)
        )


def _line(body: TextBody, catalog: Catalog, default_seed: int) -> LineRequest:
    if body.stream:
        raise BadInput("stream: a line of a batch is not streamed", field="stream")
    model = model_of(body, catalog)
    inputs = inputs_of(body, model, default_seed)
    size = model.definition.result_bytes(model)
    return LineRequest(body, model, inputs, is_repeatable(body), len(inputs) * size + _REPLY_BYTES)


def model_of(body: TextBody, catalog: Catalog) -> Model:
    """The model that a body names, or the first text model of the catalog.

    Raises:
        UnknownModel: there is no such text model.
    """
    return catalog.default("text") if body.model is None else catalog.find(body.model, "text")


def is_repeatable(body: TextBody) -> bool:
    """Whether an equal request gets an equal answer."""
    return body.seed is not None or body.temperature == 0 or body.top_p == 0


def inputs_of(body: TextBody, model: Model, default_seed: int) -> list[GenerationInput]:
    """The items of a body: n for each prompt, with consecutive seeds.

    Raises:
        BadInput: the model can't write as much.
        InputTooLarge: the prompt is too long for the model.
    """
    first = _first_of(body, model)
    # One seed for one text: with the most likely token, always, the seed changes nothing.
    seed = default_seed if body.seed is None else body.seed
    start = 0 if is_repeatable(body) and body.seed is None else seed % LARGEST_SEED
    prompts: Sequence[str | list[int]] = [""]
    if isinstance(body, CompletionBody):
        prompts = _prompts_of(body)
    made = [
        msgspec.structs.replace(first, prompt=prompt, seed=start + number)
        for prompt in prompts
        for number in range(body.n or 1)
    ]
    for one in made:
        if (tokens := one.estimate_work() - one.max_tokens) > 8 * model.generation.context_tokens:
            raise InputTooLarge(
                f"about {tokens} tokens; {model.name} reads at most "
                f"{model.generation.context_tokens}, with those that it writes",
                field="prompt" if isinstance(body, CompletionBody) else "messages",
            )
    return made


def _prompts_of(body: CompletionBody) -> Sequence[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    tokens = [one for one in body.prompt if isinstance(one, int)]
    return [tokens] if tokens else [one for one in body.prompt if not isinstance(one, int)]


def _first_of(body: TextBody, model: Model) -> GenerationInput:
    limits = model.generation
    asked = body.max_tokens
    if isinstance(body, ChatBody):
        asked = asked or body.max_completion_tokens
    if asked is not None and asked > limits.longest_tokens:
        raise BadInput(
            f"max_tokens: {model.name} writes at most {limits.longest_tokens} tokens, not {asked}",
            field="max_tokens",
        )
    made = GenerationInput(
        max_tokens=asked or limits.default_tokens,
        seed=0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        stop=body.stops,
        is_streamed=bool(body.stream),
    )
    if isinstance(body, CompletionBody):
        made.logprobs = -1 if body.logprobs is None else body.logprobs
        return made
    made.messages = [message.to_template() for message in body.messages]
    made.tools = tools_of(body)
    made.logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    made.json_schema = "" if body.response_format is None else body.response_format.to_schema()
    if forced := body.forced_tools:
        made.json_schema = call_schema([(tool.name, tool.parameters) for tool in forced])
    return made


def tools_of(body: ChatBody) -> list[dict[str, object]]:
    """The tools as a chat template gets them."""
    return [tool.model_dump(exclude_none=True) for tool in body.allowed_tools]


def results_of(outcomes: Sequence[ItemOutcome], model: Model) -> list[GenerationResult]:
    """The results of outcomes, all of which have one."""
    results = [outcome.result for outcome in outcomes]
    found = [result for result in results if isinstance(result, GenerationResult)]
    if len(found) < len(results):
        raise PenstockError(f"{model.name} gave a result that is no text; this is a bug")
    return found


def usage_of(results: Sequence[GenerationResult], choices: int = 1) -> TextUsage:
    """The tokens of an answer. The prompt counts once for its n choices, as with OpenAI."""
    read = sum(result.input_tokens for result in results[::choices])
    written = sum(result.output_tokens for result in results)
    cached = sum(result.cached_tokens for result in results[::choices])
    return TextUsage(read, written, read + written, PromptDetails(cached))


def chat_reply(
    body: ChatBody,
    made: str,
    created_at_s: float,
    model: Model,
    outcomes: Sequence[ItemOutcome],
) -> ChatReply:
    """The reply to a chat, all of whose items have a result. `made` is its id."""
    results = results_of(outcomes, model)
    choices = [chat_choice(body, made, index, result) for index, result in enumerate(results)]
    return ChatReply(made, int(created_at_s), model.name, choices, usage_of(results, body.n or 1))


def chat_choice(body: ChatBody, made: str, index: int, result: GenerationResult) -> ChatChoice:
    """One answer, with the calls of tools that are in its text."""
    text, calls = result.text, list[CalledTool]()
    if names := {tool.function.name for tool in body.allowed_tools}:
        text, calls = read_tool_calls(text, names, f"{made}:{index}")
    message = ChatMessage(text if text or not calls else None)
    if calls:
        message.tool_calls = calls
    finish_reason = "tool_calls" if calls else result.finish_reason
    logprobs = chat_logprobs(result.logprobs) if body.logprobs else None
    return ChatChoice(index, message, finish_reason, logprobs)


def chat_logprobs(given: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Log probabilities as chats show them."""
    return ChatLogprobs(
        [
            ShownTokenLogprob(
                one.token,
                one.logprob,
                list(one.data),
                [ShownLogprob(top.token, top.logprob, list(top.data)) for top in one.top],
            )
            for one in given
        ]
    )


def completion_reply(
    body: CompletionBody,
    made: str,
    created_at_s: float,
    model: Model,
    outcomes: Sequence[ItemOutcome],
) -> CompletionReply:
    """The reply to a prompt, all of whose items have a result. `made` is its id."""
    results = results_of(outcomes, model)
    choices = [
        CompletionChoice(
            index,
            result.text,
            result.finish_reason,
            None if body.logprobs is None else completion_logprobs(result.logprobs, 0),
        )
        for index, result in enumerate(results)
    ]
    return CompletionReply(
        made, int(created_at_s), model.name, choices, usage_of(results, body.n or 1)
    )


def completion_logprobs(given: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Log probabilities as completions show them. `offset`: characters of the text before."""
    ends = itertools.accumulate((len(one.token) for one in given), initial=offset)
    return CompletionLogprobs(
        [one.token for one in given],
        [one.logprob for one in given],
        [{top.token: top.logprob for top in one.top} for one in given],
        list(ends)[:-1],
    )
