"""Which kind of client sent a request, from its `User-Agent`. Rows have the kind, never the header.

The set is closed, so that reports can group by it and nobody can write text into the table.
"""

from __future__ import annotations

from functools import lru_cache

LONGEST_READ = 256
OTHER = "other"
_FAMILIES = (
    ("langchain", "langchain"),
    ("litellm", "litellm"),
    ("llama-index", "llama-index"),
    ("llama_index", "llama-index"),
    ("ai-sdk/", "ai-sdk"),
    ("openai/python", "openai-python"),
    ("openai/js", "openai-node"),
    ("openai/", "openai-other"),
    ("replicate-", "replicate"),
    ("curl/", "curl"),
    ("wget/", "wget"),
    ("python-requests/", "python-requests"),
    ("python-httpx/", "python-httpx"),
    ("aiohttp/", "python-aiohttp"),
    ("python-urllib", "python-urllib"),
    ("go-http-client/", "go"),
    ("axios/", "node"),
    ("undici", "node"),
    ("node-fetch", "node"),
    ("okhttp/", "java"),
    ("apache-httpclient/", "java"),
    ("java/", "java"),
    ("java-http-client/", "java"),
    ("postmanruntime/", "postman"),
    ("mozilla/", "browser"),
)
"""Parts of the header in lower case. The first that is found decides: wrappers come before what
they wrap, and browsers last, because many claim to be one.
"""
FAMILIES = frozenset({family for _, family in _FAMILIES} | {OTHER})


@lru_cache(maxsize=512)
def family_of(user_agent: str) -> str:
    """The kind of client that sends this header. Empty without one, `other` if it is unknown."""
    found = user_agent[:LONGEST_READ].strip().lower()
    if not found:
        return ""
    if found == "node":  # what fetch of Node sends
        return "node"
    return next((family for part, family in _FAMILIES if part in found), OTHER)
