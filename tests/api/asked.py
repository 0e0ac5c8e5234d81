"""Requests from a malicious caller: mostly valid, but each with something invalid in it."""

from __future__ import annotations

import base64
import io
import json
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st
from PIL import Image

from tests.api.harness import IMAGE_MODEL, TEXT_MODEL

T = TypeVar("T")
Headers = list[tuple[str, str]]


class Asked(NamedTuple):
    """A request: the input that becomes a job, and the route it is sent to."""

    method: str
    path: str
    body: bytes
    headers: Headers


def mostly(good: st.SearchStrategy[T], bad: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """One part in six is bad, so most requests with several parts have at most one bad part."""
    return st.integers(0, 5).flatmap(lambda draw: bad if draw == 5 else good)


def chosen(*good: T, bad: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    return mostly(st.sampled_from(good), bad)


def a_png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "png")
    return buffer.getvalue()


PNG = a_png()
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

latin = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\x00"), max_size=20)
digits = st.sampled_from(
    [
        *(
            "0",
            "-1",
            "+5",
            "1.5",
            "1e3",
            "",
            " ",
            "86400001",
            "99999999999999",
            "9" * 400,
            "9" * 5000,
            "0" * 30 + "1",
        ),
        *("0x10", "1_000", "1, 2", "NaN", "Infinity", "²", "½", "soon", "1\x00"),
    ]
)
limits = chosen("1", "250", "3000", "86400000", bad=digits)
HEADERS = {
    "x-penstock-deadline-ms": limits,
    "x-penstock-queue-limit-ms": limits,
    "x-penstock-lane": chosen(
        "batch", "BATCH", "interactive", bad=st.sampled_from(["", "fast", "\xe7", "b" * 5000])
    ),
    "cache-control": chosen(
        "no-cache", "no-store", "max-age=0, no-cache", bad=latin | st.just("no-store" * 900)
    ),
    "cancel-after": chosen(
        "30s", "5m", "1h30m", "24h", bad=digits | st.sampled_from(["999h", "h", "1h1h", "99999m"])
    ),
    "prefer": chosen(
        "wait", "wait=1", 'wait="1"', "respond-async", bad=latin | digits.map(lambda n: f"wait={n}")
    ),
    "traceparent": chosen(TRACE, bad=latin | st.sampled_from(["00-zz-1-01", "0" * 3000])),
    "tracestate": chosen("a=1,b=2", bad=latin | st.sampled_from(["a=1," * 400, "=", "a=1,a=2"])),
    "x-request-id": chosen(
        "order-17", "q" * 128, bad=latin | st.sampled_from(["q" * 4000, "{}", "../..", ""])
    ),
    "idempotency-key": mostly(
        st.uuids().map(str), latin | st.sampled_from(["", "k" * 255, "k" * 256])
    ),
    "host": chosen(
        "a.example",
        bad=latin | st.sampled_from(["[", "[::1", "a b", "", "x" * 3000, "a:99999999", "a/?#"]),
    ),
    "content-length": chosen("1", bad=digits),
    "authorization": latin,
    "accept": latin,
}
headers: st.SearchStrategy[Headers] = st.lists(
    st.one_of(*(st.tuples(st.just(name), values) for name, values in HEADERS.items())), max_size=4
)  # including two with the same name

integers = st.sampled_from([0, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 10**4000, True])
floats = st.sampled_from([100.5, -0.5, 1e308, float("nan"), float("inf"), float("-inf")])
strange = st.sampled_from(
    ["", "\x00" * 9000, "\ud800", "\udfff x", "x" * 70_000, "🐈" * 9000, "\x7f\x1b[2J", "٣"]
)
anything: st.SearchStrategy[Any] = (
    integers | floats | strange | st.none() | st.lists(strange, max_size=2) | st.just({"a": {}})
)
texts = chosen("a cat", "a dog", "\x00", "naïve 🐈", bad=strange)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "size": st.sampled_from(["64x64", "auto", "128x64"]),
    "seed": st.sampled_from([0, 7, 2**53 - 11]),
    "num_inference_steps": st.integers(1, 100),
    "guidance_scale": st.sampled_from([0, 7.5, 100, -0.0, 1e-300]),
    "negative_prompt": texts,
    "scheduler": st.sampled_from(["ddim", "euler"]),
    "output_format": st.sampled_from(["png", "webp"]),
}
OF_PREDICTIONS = {"num_outputs": FIELDS["n"], "width": st.just(64), "height": st.just(64)} | {
    name: values for name, values in FIELDS.items() if name not in ("n", "size")
}


def drawn(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A prompt and up to three other fields."""
    some = st.lists(
        st.one_of(
            *(st.tuples(st.just(name), mostly(values, anything)) for name, values in fields.items())
        ),
        max_size=3,
    )
    return st.builds(lambda prompt, others: {"prompt": prompt, **dict(others)}, texts, some)


def with_strength(
    given: st.SearchStrategy[dict[str, Any]], **more: Any
) -> st.SearchStrategy[dict[str, Any]]:
    strengths = mostly(st.sampled_from([0.5, 1.0, 1]), floats | anything)
    return st.builds(
        lambda body, strength: {**body, **more, "strength": strength}, given, strengths
    )


token_ids = mostly(st.integers(0, 2**31 - 1), integers)
tokens: st.SearchStrategy[Any] = st.lists(token_ids, max_size=3) | st.lists(
    st.lists(token_ids, max_size=3), max_size=2
)
models = st.sampled_from(
    ["gpt-9", "", "m" * 5000, "a\x00b", "\ud800", "../x", IMAGE_MODEL.name, TEXT_MODEL.name]
)
sides = chosen("end", "start", bad=strange)
embeddings = st.fixed_dictionaries(
    {
        "model": chosen(TEXT_MODEL.name, bad=models),
        "input": mostly(texts | st.lists(texts, min_size=1, max_size=3) | tokens, anything),
    },
    optional={
        "dimensions": chosen(1, 384, bad=anything),
        "truncate": sides,
        "tokenizer": chosen(TEXT_MODEL.name, bad=models),
        "user": texts,
    },
)
inputs = {
    TEXT_MODEL.name: st.fixed_dictionaries({"text": texts}, optional={"truncate": sides})
    | st.fixed_dictionaries({"texts": st.lists(texts)}),
    IMAGE_MODEL.name: drawn(OF_PREDICTIONS) | with_strength(drawn(OF_PREDICTIONS), image=URI),
}
URLS = [
    "https://[",
    "http:///x",
    "https://a\x00b",
    "https://" + "a" * 3000,
    "\ud800",
    "ftp://a",
    "https://a:99999999/",
]
webhooks = chosen("https://a.example/h", bad=st.sampled_from(URLS))
EVENTS = ["start", "completed"]
told = st.fixed_dictionaries(
    {}, optional={"webhook": webhooks, "webhook_events_filter": st.just(EVENTS)}
)
owners = chosen("", "owner/", bad=latin.map(lambda name: f"{name}/") | st.just("o" * 9000 + "/"))


def predictions(model: str) -> st.SearchStrategy[Asked]:
    """Predictions from one model, through every route that creates predictions."""
    versions = st.builds(lambda owner, name: owner + name, owners, chosen(model, bad=models))
    given = st.builds(
        lambda about, more: {"input": about, **more}, mostly(inputs[model], drawn(FIELDS)), told
    )
    versioned = st.builds(lambda body, version: {"version": version, **body}, given, versions)
    own_ids = mostly(st.uuids().map(str), latin)
    of_model = st.tuples(
        st.sampled_from(["models", "deployments"]),
        chosen("owner", bad=latin),
        chosen(model, bad=models),
    )
    return st.one_of(
        st.builds(as_json, st.sampled_from(["/v1/predictions", "/predictions"]), versioned),
        st.builds(
            as_json, own_ids.map(lambda own: f"/v1/predictions/{own}"), versioned, st.just("PUT")
        ),
        st.builds(as_json, of_model.map(lambda at: "/v1/{}/{}/{}/predictions".format(*at)), given),
    )


def as_json(path: str, body: object, method: str = "POST") -> Asked:
    """Includes values that Python's encoder accepts but JSON doesn't allow: NaN and Infinity.

    Lone surrogates are escaped.
    """
    return Asked(method, path, json.dumps(body).encode(), [("content-type", "application/json")])


charsets = chosen(
    *("utf-8", "UTF-8"),
    bad=st.sampled_from(
        [
            "utf-7",
            "utf-16",
            "unicode_escape",
            "idna",
            "undefined",
            "punycode",
            "rot13",
            "\xff",
            "x" * 300,
        ]
    ),
)


def as_form(fields: dict[str, Any], charset: str) -> Asked:
    """A form with an image, and texts encoded in the charset named in its header, if possible."""
    parts = []
    for name, value in fields.items():
        text = str(value).encode("utf-7" if charset == "utf-7" else "utf-8", "surrogatepass")
        parts.append(
            b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
            % (name.encode(), text)
        )
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    kind = f"multipart/form-data; boundary=b; charset={charset}"
    body = b"".join(parts) + head + PNG + b"\r\n--b--\r\n"
    return Asked("POST", "/v1/images/edits", body, [("content-type", kind)])


EDITS = with_strength(drawn(FIELDS))
garbage = st.builds(
    lambda path, body: Asked("POST", path, body, [("content-type", "application/json")]),
    st.sampled_from(
        ["/v1/embeddings", "/v1/images/generations", "/v1/images/edits", "/v1/predictions"]
    ),
    st.binary(max_size=20)
    | st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"null", b"NaN"]),
)
requests: st.SearchStrategy[Asked] = mostly(
    st.one_of(
        st.builds(as_json, st.just("/v1/embeddings"), embeddings),
        st.builds(as_json, st.just("/v1/images/generations"), drawn(FIELDS)),
        st.builds(
            as_json,
            st.just("/v1/images/edits"),
            EDITS.map(lambda body: body | {"images": [{"image_url": URI}]}),
        ),
        st.builds(as_form, EDITS, charsets),
        predictions(TEXT_MODEL.name),
        predictions(IMAGE_MODEL.name),
    ),
    garbage,
)
