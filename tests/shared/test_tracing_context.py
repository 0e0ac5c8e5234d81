"""W3C Trace Context as callers send it: values are either read or ignored, and none causes a
failure.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tracing.spans import (
    MAX_MEMBERS,
    MAX_TRACESTATE_CHARS,
    TraceContext,
    current,
    read_attributes,
    read_context,
    read_headers,
    use_context,
)

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_parts_of_a_context() -> None:
    context = read_context(PARENT, "a=1")
    assert context == TraceContext(PARENT, "a=1")
    assert (context.trace_id, context.span_id, context.is_sampled) == (TRACE_ID, SPAN_ID, True)
    assert context.exemplar == {"trace_id": TRACE_ID, "span_id": SPAN_ID}
    assert context.attributes() == {"traceparent": PARENT, "tracestate": "a=1"}


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)]
)
def test_one_bit_says_whether_spans_are_kept(flags: str, is_sampled: bool) -> None:
    context = read_context(f"00-{TRACE_ID}-{SPAN_ID}-{flags}")
    assert context is not None
    assert context.is_sampled == is_sampled
    assert (context.exemplar is not None) == is_sampled


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        PARENT[:-1],
        f"{PARENT}-more",  # only later versions may have more fields
        f"{PARENT} ",
        PARENT.upper(),
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-0g",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
    ],
)
def test_invalid_traceparent_is_none(traceparent: str) -> None:
    assert read_context(traceparent, "a=1") is None


@pytest.mark.parametrize("traceparent", [f"01{PARENT[2:]}", f"cc{PARENT[2:]}-what-comes"])
def test_later_version_is_passed_on_as_this_one(traceparent: str) -> None:
    assert read_context(traceparent) == TraceContext(PARENT)


@pytest.mark.parametrize(
    ("tracestate", "kept"),
    [
        ("a=1, b=2\t,,c=3", "a=1,b=2,c=3"),
        ("tenant@system=x y", "tenant@system=x y"),
        ("a", ""),
        ("A=1", ""),
        ("a=1,a=2", ""),
        ("a=1,b=\x7f", ""),
        ("a=é", ""),
        (
            ",".join(f"k{n}=1" for n in range(MAX_MEMBERS)),
            ",".join(f"k{n}=1" for n in range(MAX_MEMBERS)),
        ),
        (",".join(f"k{n}=1" for n in range(MAX_MEMBERS + 1)), ""),
        (f"a=1,b={'x' * 250},c={'y' * 250},d=2", f"a=1,b={'x' * 250},c={'y' * 250}"),
        (f"a={'x' * 256},b={'y' * 255}", f"a={'x' * 256}"),
    ],
)
def test_tracestate_is_bounded_and_fails_alone(tracestate: str, kept: str) -> None:
    assert read_context(PARENT, tracestate) == TraceContext(PARENT, kept)


def test_headers_of_one_name_are_joined_or_refused() -> None:
    parent, states = (
        (b"traceparent", PARENT.encode()),
        [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")],
    )
    assert read_headers([parent, *states]) == TraceContext(PARENT, "a=1,b=2")
    assert read_headers([parent, parent]) is None
    assert read_headers([(b"accept", b"*/*")]) is None


@given(st.text(max_size=80), st.text(max_size=2000))
def test_no_header_raises(traceparent: str, tracestate: str) -> None:
    read_context(traceparent, tracestate)
    context = read_context(PARENT, tracestate)
    assert context is not None
    assert len(context.tracestate) <= MAX_TRACESTATE_CHARS
    # Forwarded attributes are read back unchanged, so the next process sees the same values.
    assert read_attributes(context.attributes()) == context


def test_current_trace_is_that_of_the_block() -> None:
    assert current() is None
    with use_context(TraceContext(PARENT)) as _:
        assert current() == TraceContext(PARENT)
    assert current() is None
