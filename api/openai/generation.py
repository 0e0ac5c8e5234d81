"""Chat completions and completions: converts request bodies to inputs, and outcomes to responses.

Tool calls are parsed from the model's text. Each model family is trained on a specific format,
which its chat template shows:

- Hermes, Qwen: one or more `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
- SmolLM2: `<tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>`.
- Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`.
- Llama 3.1: the text is `{"name": …, "parameters": {…}}`, possibly after `<|python_tag|>`.

For every family, a forced call uses the Llama 3.1 format, but with `arguments`. Its JSON schema
embeds each tool's schema as a separate resource (JSON Schema 2020-12, section 9.3) with an `$id`.
This way, references and anchors keep their meaning, and nothing has to be rewritten. If a schema
allows it, models make up arguments until they run out of tokens, so an object that lists its
properties can't have others unless its schema explicitly allows them or other parts of the schema
may add properties.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from api.batches.documents import LineUsage
from api.batches.endpoint import Endpoint, LineRequest, ReplyTools
from api.chat_bodies import ChatBody, CompletionBody, FunctionTool
from api.openai.chat_replies import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    PromptDetails,
    ShownLogprob,
    ShownTokenLogprob,
    TextUsage,
)
from api.tasks.base import check_results
from shared.errors import BadInput
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Model
from shared.models.tasks.text import (
    GenerationInput,
    GenerationResult,
    TokenLogprob,
    is_sampling_repeatable,
)

CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX = "chatcmpl-", "cmpl-", "resp_"
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_JOINED = ("allOf", "anyOf", "oneOf")
_OF_PARTS = (
    *("items", "prefixItems", "contains", "additionalProperties", "unevaluatedItems"),
    *("not", "if", "then", "else"),
)
"""Keywords whose values are schemas.

The values of other keywords, such as `const`, may contain something that only looks like a schema.
"""
_MIXED = frozenset({"allOf", "dependentSchemas", "dependencies", "if", "not", "$dynamicRef"})
"""If any of these keywords is present, an object's properties may be listed in several places."""
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_BRANCHES = frozenset({"anyOf", "oneOf", "$ref"})
_SAYS_NOTHING = frozenset({"type", "title", "description", "$schema", "$comment"})
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

_WHOLE, _WITHIN = ("{", "<|python_tag|>"), ("<tool_call>", "[TOOL_CALLS]")
"""Prefixes of a text that consists of a call, and markers that precede a call."""
_SIGN = re.compile("|".join(map(re.escape, _WITHIN)))
_WHOLE_CALL = re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?=\{)")
_CLOSING = re.compile(r"\s*</tool_call>")
_SPACE = re.compile(r"\s*")
_CUT_CALL = re.compile(r'\s*+(?:\[\s*+)?\{\s*+"name"\s*+:\s*+"(?P<name>[\w-]{1,64})"')
_ARGUMENTS = re.compile(r'\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+')
_decoder = json.JSONDecoder()

TextBody = ChatBody | CompletionBody
B = TypeVar("B", ChatBody, CompletionBody)
BuildReply = Callable[[B, str, float, Model, Sequence[ItemOutcome]], msgspec.Struct]
MAX_SEED = 2**53
_REPLY_BYTES = 512


def answer_id(prefix: str, own_id: str) -> str:
    """Returns a response's ID: a prefix and 24 hexadecimal digits, as in OpenAI's API.

    The digits come from the prediction if the response is one, and otherwise from the request. IDs
    therefore have the same format for every kind of request, and a stored response can be found by
    its ID.

    Args:
        own_id: ID of the prediction or the request.
    """
    return prefix + own_id.partition("_")[2]


def call_schema(tools: Sequence[tuple[str, dict[str, Any] | None]]) -> str:
    """Returns a JSON schema, serialized, for a call to one of these tools.

    Args:
        tools: each tool's name and argument schema. A None schema means the tool takes no
            arguments.

    Raises:
        BadInput: two schemas have the same `$id`, or a tool's `$id` is not a URI.
    """
    forms, parts, named = [], {}, dict[str, Any]()
    for number, (name, parameters) in enumerate(tools):
        part = _close_schema(parameters)
        tool_id = part.setdefault("$id", f"urn:penstock:tool:{number}")
        if not isinstance(tool_id, str) or not tool_id.partition("#")[0]:
            raise BadInput(f"tools: the $id of tool {name[:80]!r} must be a URI", field="tools")
        for schema, _ in _schemas_in(part):
            schema_id = schema.get("$id")
            if isinstance(schema_id, str) and named.setdefault(schema_id, schema) != schema:
                raise BadInput(
                    f"tools: two schemas have the same $id, {schema_id[:80]!r}", field="tools"
                )
        parts[str(number)] = part  # names may repeat
        forms.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": tool_id}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return json.dumps({**whole, "$defs": parts})


def _close_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the schema for a tool's arguments, with additional properties disallowed."""
    if not parameters or not parameters.keys() - _SAYS_NOTHING:
        return dict(_NO_PARAMETERS)
    schema: dict[str, Any] = json.loads(json.dumps(parameters))
    if "properties" in schema:
        schema.setdefault("type", "object")
    schemas = list(_schemas_in(schema))
    if not any(_is_mixed(subschema, is_branch=is_branch) for subschema, is_branch in schemas):
        for subschema, is_branch in schemas:
            if (
                "properties" in subschema
                and not is_branch
                and not subschema.keys() & (_OPEN | _BRANCHES)
            ):
                subschema["additionalProperties"] = False
    return schema


def _is_mixed(schema: dict[str, Any], *, is_branch: bool) -> bool:
    """Returns whether other schemas may add properties to this schema or its references."""
    refers = "$ref" in schema and (is_branch or "properties" in schema)
    return refers or not _MIXED.isdisjoint(schema)


def _schemas_in(schema: Any) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yields each nested schema, with True if it is a branch of a schema with properties."""
    waiting = [(schema, False)]
    while waiting:
        subschema, is_branch = waiting.pop()
        if not isinstance(subschema, dict):
            continue
        yield subschema, is_branch
        for keyword in _BY_NAME:
            if isinstance(named := subschema.get(keyword), dict):
                waiting += [(part, False) for part in named.values()]
        for keyword in _JOINED:
            if isinstance(joined := subschema.get(keyword), list):
                waiting += [(part, is_branch or "properties" in subschema) for part in joined]
        for keyword in _OF_PARTS:
            parts = subschema.get(keyword)
            waiting += [(part, False) for part in (parts if isinstance(parts, list) else [parts])]


class _Found(NamedTuple):
    """Calls found in the text, and the position just past the last one."""

    calls: list[CalledTool]
    end: int


def read_tool_calls(
    text: str, names: Collection[str], id_seed: str
) -> tuple[str, list[CalledTool]]:
    """Splits generated text into the model's message and its tool calls.

    A call to an unknown tool is left as text, as is anything that is not JSON.

    Args:
        text: text as generated by the model.
        names: names of the caller's tools.
        id_seed: seed for the calls' IDs. The same seed yields the same IDs on any instance.

    Returns:
        The text before, between, and after the calls, followed by the calls in order.
    """
    calls: list[CalledTool] = []
    rest, at = [], 0
    for start, one_call in _find_whole(text, names) or _find_within(text, names):
        calls += one_call.calls
        rest.append(text[at:start])
        at = one_call.end
    if not calls:
        return text, []
    for number, call in enumerate(calls):
        call.id = _id_of(f"{id_seed}:{number}")
    return "".join([*rest, text[at:]]).rstrip(), calls


def extract_message_text(text: str) -> str:
    """Returns the part of the text so far that is not, and can't turn into, a call.

    It is always a prefix of the text that `read_tool_calls` returns later.
    """
    start = text.lstrip()
    if not start or any(start.startswith(sign) or sign.startswith(start) for sign in _WHOLE):
        return ""
    if match := _SIGN.search(text):
        return text[: match.start()].rstrip()
    longest = max(map(len, _WITHIN)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(sign.startswith(text[-length:]) for sign in _WITHIN):
            return text[:-length].rstrip()
    # Whitespace before a call is not part of the message.
    return text.rstrip()


def read_cut_call(
    text: str, names: Collection[str], id_seed: str, *, is_whole: bool
) -> tuple[str, CalledTool | None]:
    """Splits truncated text into the part before its last call and the call itself.

    Args:
        text: the text that `read_tool_calls` returned.
        names: names of the caller's tools.
        id_seed: seed for the call's ID.
        is_whole: True if the whole text may be a call.

    Returns:
        The unchanged text and None, if the tool name is not yet complete.
    """
    before = _WHOLE_CALL.match(text) if is_whole else None
    signs = [(sign.start(), sign.end()) for sign in _SIGN.finditer(text)]
    start, at = (0, before.end()) if before else (signs or [(0, -1)])[-1]
    cut_call = _CUT_CALL.match(text, at) if at >= 0 else None
    if cut_call is None or cut_call["name"] not in names:
        return text, None
    arguments = _ARGUMENTS.match(text, cut_call.end())
    written = text[arguments.end() :] if arguments else ""
    # the call is complete, and more calls were supposed to follow
    with contextlib.suppress(ValueError, RecursionError):
        written = written[: _decoder.raw_decode(written)[1]]
    call = CalledTool(_id_of(id_seed), CalledFunction(cut_call["name"], written))
    return text[:start].rstrip(), call


class BegunCall(NamedTuple):
    """A partially generated call."""

    name: str
    arguments: str
    """JSON, possibly incomplete, as generated by the model."""


def read_begun_call(text: str) -> BegunCall | None:
    """Returns the call at the start of the text, once its name is complete.

    When the text grows, the new arguments start with the previously parsed ones.
    """
    start = _WHOLE_CALL.match(text)
    return _parse_begun_call(text, start.end()) if start else None


def first_call(opened_call: BegunCall, id_seed: str) -> CalledTool:
    """Returns a partial call in the format of a response, with its final ID."""
    function = CalledFunction(opened_call.name, opened_call.arguments)
    return CalledTool(_id_of(f"{id_seed}:0"), function)


def _parse_begun_call(text: str, at: int) -> BegunCall | None:
    call = _CUT_CALL.match(text, at)
    if call is None:
        return None
    begin = _ARGUMENTS.match(text, call.end())
    if begin is None or text[begin.end() : begin.end() + 1] != "{":
        return BegunCall(call["name"], "")
    written = text[begin.end() :]
    with contextlib.suppress(ValueError, RecursionError):  # not complete yet
        written = written[: _decoder.raw_decode(written)[1]]
    return BegunCall(call["name"], written)


def _find_whole(text: str, names: Collection[str]) -> list[tuple[int, _Found]]:
    """Returns the call if the whole text is a call."""
    before = _WHOLE_CALL.match(text)
    calls = _calls_at(text, before.end(), names) if before else None
    return [(0, calls)] if calls is not None and not text[calls.end :].strip() else []


def _find_within(text: str, names: Collection[str]) -> list[tuple[int, _Found]]:
    """Returns the calls that follow markers, each with its marker's position."""
    calls: list[tuple[int, _Found]] = []
    end = 0
    for sign in _SIGN.finditer(text):
        if sign.start() < end:
            continue
        group = _calls_at(text, sign.end(), names)
        if group is not None:
            calls.append((sign.start(), group))
            end = group.end
    return calls


def _calls_at(text: str, at: int, names: Collection[str]) -> _Found | None:
    """Returns the calls in the JSON object or list at a position.

    None if any of them is not a call.
    """
    start = _SPACE.match(text, at)
    try:
        value, end = _decoder.raw_decode(text, start.end() if start else at)
    except (ValueError, RecursionError):
        return None
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(_is_call(element, names) for element in listed):
        return None
    closing = _CLOSING.match(text, end)
    calls = [_call_of(element) for element in listed]
    opened_call = _parse_begun_call(text, at)
    if (
        opened_call is not None
        and opened_call.arguments
        and opened_call.name == calls[0].function.name
    ):
        calls[0].function.arguments = opened_call.arguments  # exactly as in a stream
    return _Found(calls, closing.end() if closing else end)


def _is_call(value: Any, names: Collection[str]) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"] in names


def _call_of(value: dict[str, Any]) -> CalledTool:
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
    except UnicodeEncodeError:
        arguments = json.dumps(arguments)
    # A lone surrogate is not valid text. It stays escaped, as generated by the model.
    arguments = arguments.encode("utf-8", "backslashreplace").decode()
    return CalledTool("", CalledFunction(value["name"], arguments))


def _id_of(seed: str) -> str:
    return f"call_{hashlib.blake2b(seed.encode(), digest_size=12).hexdigest()}"


class TextEndpoint(Endpoint, Generic[B]):
    """Batch lines with the same body as a route for text.

    Args:
        id_prefix: start of each response's ID.
        reply: builds the response from the body, its ID, the time, the model, and the outcomes.
    """

    def __init__(self, body: type[B], id_prefix: str, reply: BuildReply[B]) -> None:
        self._body: type[B] = body
        self._id_prefix = id_prefix
        self._reply: BuildReply[B] = reply

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item for each prompt and choice."""
        body = self._body.model_validate_json(data, strict=True)
        if body.stream:
            raise BadInput("stream: is not supported in batches; omit it", field="stream")
        model = model_of(body, catalog)
        inputs = inputs_of(body, model, default_seed)
        max_bytes = len(inputs) * model.definition.result_bytes(model) + _REPLY_BYTES
        return LineRequest(body, model, inputs, is_repeatable(body), max_bytes)

    def usage(
        self,
        request: LineRequest,
        outcomes: Sequence[ItemOutcome],
        answered: Sequence[ItemOutcome],
    ) -> LineUsage:
        """Matches the usage in the response: a prompt is counted once for its n choices."""
        body = cast("ChatBody | CompletionBody", request.body)
        usage = usage_of(results_of(answered, request.model), body.n or 1)
        cached = usage.prompt_tokens_details.cached_tokens
        return LineUsage(usage.prompt_tokens, usage.completion_tokens, cached)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        body, answer_id = cast(B, request.body), self._id_prefix + secrets.token_hex(12)
        return msgspec.json.encode(
            self._reply(body, answer_id, time.time(), request.model, outcomes)
        )


def model_of(body: TextBody, catalog: Catalog) -> Model:
    """Returns the model named in a body, or the first text model in the catalog.

    Raises:
        UnknownModel: the text model does not exist.
    """
    return catalog.default("text") if body.model is None else catalog.find(body.model, "text")


def is_repeatable(body: TextBody) -> bool:
    """Returns whether an identical request produces an identical response."""
    return is_sampling_repeatable(body.seed, body.temperature, body.top_p)


def inputs_of(body: TextBody, model: Model, default_seed: int) -> list[GenerationInput]:
    """Returns a body's items: n per prompt, with consecutive seeds.

    Raises:
        BadInput: the model can't generate that many tokens.
        ContextLengthExceeded: the prompt is far too long for the model.
    """
    first = _first_of(body, model)
    # Use a single seed for greedy decoding, where the seed has no effect.
    seed = default_seed if body.seed is None else body.seed
    start = 0 if is_repeatable(body) and body.seed is None else seed % MAX_SEED
    prompts: Sequence[str | list[int]] = [""]
    if isinstance(body, CompletionBody):
        prompts = body.prompts
    inputs = [
        msgspec.structs.replace(first, prompt=prompt, seed=start + number)
        for prompt in prompts
        for number in range(body.n or 1)
    ]
    for generation_input in inputs:
        generation_input.check_length(model.generation.context_tokens)
    return inputs


def _first_of(body: TextBody, model: Model) -> GenerationInput:
    limits = model.generation
    tokens = body.max_tokens
    if isinstance(body, ChatBody):
        tokens = tokens or body.max_completion_tokens
    if tokens is not None and tokens > limits.longest_tokens:
        raise BadInput(
            f"max_tokens: must be at most {limits.longest_tokens} for {model.name}, got {tokens}",
            field="max_tokens",
        )
    prompt = GenerationInput(
        max_tokens=tokens or limits.default_tokens,
        seed=0,
        ends_with_context=tokens is None,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.biases,
        stop=body.stops,
        is_streamed=bool(body.stream),
    )
    if isinstance(body, CompletionBody):
        prompt.logprobs = -1 if body.logprobs is None else body.logprobs
        prompt.is_echoed = bool(body.echo)
        return prompt
    prompt.template_options = body.chat_template_kwargs or {}
    prompt.messages = [message.to_template() for message in body.messages]
    prompt.tools = tools_of(body)
    prompt.logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    prompt.json_schema = "" if body.response_format is None else body.response_format.to_schema()
    if forced := body.forced_tools:
        prompt.json_schema = call_schema([(tool.name, tool.parameters) for tool in forced])
        prompt.schema_field = _parameters_field(body, forced)
    return prompt


def _parameters_field(body: ChatBody, forced: Sequence[FunctionTool]) -> str:
    """Returns the field that determines a call's schema."""
    if len(forced) > 1:
        return "tools"
    functions = [tool.function for tool in body.tools or ()]
    return f"tools[{functions.index(forced[0])}].function.parameters"


def tools_of(body: ChatBody) -> list[dict[str, object]]:
    """Returns the tools in the format that chat templates expect."""
    return [tool.model_dump(exclude_none=True) for tool in body.allowed_tools]


def results_of(outcomes: Sequence[ItemOutcome], model: Model) -> list[GenerationResult]:
    """Returns the outcomes' results; every outcome must have one."""
    return check_results((outcome.result for outcome in outcomes), GenerationResult, model)


def usage_of(results: Sequence[GenerationResult], choices: int = 1) -> TextUsage:
    """Returns the token usage. The prompt is counted once for its n choices, as in OpenAI's API."""
    read = sum(result.input_tokens for result in results[::choices])
    written = sum(result.output_tokens for result in results)
    cached = sum(result.cached_tokens for result in results[::choices])
    return TextUsage(read, written, read + written, PromptDetails(cached))


def chat_reply(
    body: ChatBody,
    completion_id: str,
    created_at_s: float,
    model: Model,
    outcomes: Sequence[ItemOutcome],
) -> ChatReply:
    """Returns the response to a chat whose items all have results."""
    results = results_of(outcomes, model)
    choices = [
        chat_choice(body, completion_id, index, result) for index, result in enumerate(results)
    ]
    return ChatReply(
        completion_id, int(created_at_s), model.name, choices, usage_of(results, body.n or 1)
    )


def chat_choice(body: ChatBody, choice_id: str, index: int, result: GenerationResult) -> ChatChoice:
    """Returns one choice, including any tool calls in its text."""
    text, calls, cut_call = result.text, list[CalledTool](), None
    if names := {tool.function.name for tool in body.allowed_tools}:
        seed = f"{choice_id}:{index}"
        text, calls = read_tool_calls(text, names, seed)
        # A forced call cut off by a stop sequence still counts as a call, because a stream has
        # already sent its start.
        if result.finish_reason == "length" or (body.forced_tools and not calls):
            seed, is_whole = f"{seed}:{len(calls)}", not calls
            text, cut_call = read_cut_call(text, names, seed, is_whole=is_whole)
            calls += [cut_call] if cut_call is not None else []
            if body.forced_tools and not calls and text.lstrip().startswith(_WHOLE):
                text = ""  # even the tool's name is incomplete
    message = ChatMessage(text or None if calls or body.forced_tools else text)
    if calls:
        message.tool_calls = calls
    finish_reason = "tool_calls" if calls and cut_call is None else result.finish_reason
    logprobs = chat_logprobs(result.logprobs) if body.logprobs else None
    return ChatChoice(index, message, finish_reason, logprobs)


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Returns log probabilities in the chat format."""
    return ChatLogprobs(
        [
            ShownTokenLogprob(
                token.token,
                token.logprob,
                list(token.data),
                [ShownLogprob(top.token, top.logprob, list(top.data)) for top in token.top],
            )
            for token in tokens
        ]
    )


def completion_reply(
    body: CompletionBody,
    completion_id: str,
    created_at_s: float,
    model: Model,
    outcomes: Sequence[ItemOutcome],
) -> CompletionReply:
    """Returns the response to a prompt whose items all have results."""
    results = results_of(outcomes, model)
    choices = [
        CompletionChoice(
            index,
            _before(body, result, index) + result.text,
            result.finish_reason,
            None if body.logprobs is None else _whole_logprobs(result),
        )
        for index, result in enumerate(results)
    ]
    return CompletionReply(
        completion_id, int(created_at_s), model.name, choices, usage_of(results, body.n or 1)
    )


def _before(body: CompletionBody, result: GenerationResult, index: int) -> str:
    """Returns the prompt if it should be echoed, either as sent or as the text of its tokens."""
    if not body.echo:
        return ""
    prompt = body.prompts[index // (body.n or 1)]
    return prompt if isinstance(prompt, str) else result.prompt_text


def _whole_logprobs(result: GenerationResult) -> CompletionLogprobs:
    logprobs = completion_logprobs([*result.prompt_logprobs, *result.logprobs], 0)
    if result.prompt_logprobs:  # nothing comes before the first token
        logprobs.token_logprobs[0] = logprobs.top_logprobs[0] = None
    return logprobs


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Returns log probabilities in the completions format.

    `offset`: number of characters before the tokens.

    The most likely tokens include the generated one. A token that is not a complete character is
    shown as bytes, as is a token with the same text as another token.
    """
    reader = codecs.getincrementaldecoder("utf-8")(errors="replace")
    ends = itertools.accumulate(
        (len(reader.decode(token.data)) for token in tokens), initial=offset
    )
    return CompletionLogprobs(
        [_show_token(token) for token in tokens],
        [token.logprob for token in tokens],
        [_alternatives(token) for token in tokens],
        list(ends)[:-1],
    )


def _alternatives(token: TokenLogprob) -> dict[str, float] | None:
    logprobs = {_show_token(token): token.logprob}
    is_left_out = True  # the token itself, which may or may not be among the most likely
    for alternative in token.top:
        if is_left_out and (alternative.data, alternative.logprob) == (token.data, token.logprob):
            is_left_out = False
            continue
        name = _show_token(alternative)
        while name in logprobs:
            name = _by_bytes(alternative.data) if name == alternative.token else f"{name} "
        logprobs[name] = alternative.logprob
    return dict(sorted(logprobs.items(), key=lambda named: -named[1]))


def _show_token(token: TokenLogprob) -> str:
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return _by_bytes(token.data)


def _by_bytes(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
