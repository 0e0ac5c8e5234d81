"""LiteLLM as a proxy in front of the service.

OpenAI's and Anthropic's clients call it, and it calls the service.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    LIMIT_S,
    URL,
    WRITER,
    assert_same,
    check,
    fresh,
    main,
    needs_text,
    raises,
    vectors,
)

ASKED: Any = [{"role": "user", "content": "What is a mill?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"color": {"type": "string", "enum": ["red", "green"]}},
            "required": ["color"],
            "additionalProperties": False,
        },
    },
}
OURS = {"api_base": f"{URL}/v1", "api_key": KEY}
MODELS = {
    "writer": {"model": f"openai/{WRITER}", **OURS},
    "claude": {"model": f"anthropic/{WRITER}", "api_base": URL, "api_key": KEY},
    "embedder": {"model": f"openai/{EMBEDDER}", **OURS},
    "stranger": {"model": f"openai/{WRITER}", **OURS, "api_key": "wrong-" + "0" * 40},
}
PROXY_KEY = "sk-of-the-proxy"
FORCED: Any = {"tool_choice": "required", "max_tokens": 64}
at: str
"""The proxy's URL."""


@contextmanager
def proxy() -> Iterator[str]:
    """Runs LiteLLM's proxy, started as its docs describe, and yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = [{"model_name": name, "litellm_params": given} for name, given in MODELS.items()]
    with tempfile.TemporaryDirectory(prefix="penstock-litellm-") as folder:
        config = Path(folder) / "config.yaml"
        settings = {"model_list": models, "general_settings": {"master_key": PROXY_KEY}}
        config.write_text(json.dumps(settings))  # also valid YAML
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
        log = Path(folder) / "log"
        with log.open("w") as output:
            running = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                # Prices come with the package instead of being fetched over the network.
                env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": folder},
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_ready(f"http://127.0.0.1:{port}", running, log)
                yield f"http://127.0.0.1:{port}"
            finally:
                running.terminate()
                running.wait(LIMIT_S)


def wait_ready(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + 4 * LIMIT_S
    while time.monotonic() < until_s and running.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health/liveliness", timeout=LIMIT_S).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the proxy did not start: {log.read_text()[-1500:]}")


def client() -> Any:
    return openai.OpenAI(base_url=f"{at}/v1", api_key=PROXY_KEY, timeout=LIMIT_S)


def asked(model: str = "writer", **options: Any) -> dict[str, Any]:
    needs_text()
    return {"model": model, "messages": ASKED, "max_tokens": 16, "temperature": 0, **options}


@check
def chat_streamed_is_the_chat() -> None:
    for model in ("writer", "claude"):
        chunks = list(client().chat.completions.create(**asked(model, stream=True)))
        pieces = [one.choices[0].delta.content or "" for one in chunks if one.choices]
        assert len(pieces) > 1, model
        whole = client().chat.completions.create(**asked(model))
        assert "".join(pieces) == whole.choices[0].message.content, model
        assert whole.usage.completion_tokens > 5, model


@check
def tool_loop_of_three_steps() -> None:
    for model in ("writer", "claude"):
        messages: list[Any] = [{"role": "user", "content": "Paint it."}]
        for _ in range(3):
            made = client().chat.completions.create(
                **asked(model, messages=messages, tools=[TOOL], **FORCED)
            )
            (call,) = made.choices[0].message.tool_calls
            assert json.loads(call.function.arguments)["color"] in ("red", "green"), model
            messages.append(made.choices[0].message.model_dump(exclude_none=True))
            done = {"role": "tool", "tool_call_id": call.id, "content": "It is painted."}
            messages.append(done)


@check
def tool_is_called_in_a_stream() -> None:
    for model in ("writer", "claude"):
        given = asked(model, tools=[TOOL], **FORCED)
        with client().chat.completions.stream(**given) as stream:
            made = stream.get_final_completion()
        (call,) = made.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["color"] in ("red", "green"), model


@check
def schema_is_filled() -> None:
    schema = {"name": "paint", "schema": TOOL["function"]["parameters"]}
    made = client().chat.completions.create(
        **asked(response_format={"type": "json_schema", "json_schema": schema})
    )
    assert json.loads(made.choices[0].message.content)["color"] in ("red", "green")


@check
def responses_follow_one_another() -> None:
    needs_text()
    given: Any = {"model": "writer", "max_output_tokens": 16}
    first = client().responses.create(**given, input="What is a mill?")
    assert first.output_text
    second = client().responses.create(**given, input="And a river?", previous_response_id=first.id)
    assert second.output_text
    events = list(client().responses.create(**given, input="What is a mill?", stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


@check
def messages_of_anthropics_client() -> None:
    needs_text()
    made = anthropic.Anthropic(base_url=at, api_key=PROXY_KEY, timeout=LIMIT_S)
    for model in ("claude", "writer"):
        whole = made.messages.create(model=model, max_tokens=16, messages=ASKED)
        assert whole.content[0].text, model
        with made.messages.stream(model=model, max_tokens=16, messages=ASKED) as stream:
            assert "".join(stream.text_stream), model


@check
def embeddings() -> None:
    texts = fresh(20)
    made = client().embeddings.create(model="embedder", input=texts)
    assert_same([one.embedding for one in made.data], vectors(texts))


@check
def errors_pass_with_their_status() -> None:
    long = [{"role": "user", "content": "the turbine turns " * 2000}]
    for model in ("writer", "claude"):
        for stream in (False, True):
            with raises(openai.BadRequestError) as caught:
                client().chat.completions.create(**asked(model, messages=long, stream=stream))
            # This name falls back to a model with a longer context.
            assert "ContextWindowExceededError" in str(caught.error), (
                model,
                stream,
                str(caught.error),
            )
    with raises(openai.BadRequestError):
        client().chat.completions.create(**asked(temperature=9))


@check
def wrong_key_of_ours_is_told() -> None:
    with raises(openai.AuthenticationError):
        client().chat.completions.create(**asked("stranger"))


with proxy() as at:
    main()
