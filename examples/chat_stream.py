"""Streams a chat with OpenAI's client and prints each piece as it arrives.

Serve a language model first, as README.md in this folder shows. Then run `.venv/bin/python
examples/chat_stream.py "What is a penstock?"`. The question is optional. To use a different address
or a key, set PENSTOCK_URL and PENSTOCK_API_KEY.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

URL = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8080")
NO_MODEL = (
    "No language model is served. Install one with `make text`, add it to the catalog as described "
    "in examples/README.md, and restart `make up`."
)


def main(question: str = "What is the capital of France?") -> None:
    """Prints the answer to `question` while it is generated."""
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("PENSTOCK_API_KEY", "any"))
    # `task` is a field that Penstock adds: embedding, image or text.
    served = [model.id for model in client.models.list() if getattr(model, "task", "") == "text"]
    if not served:
        sys.exit(NO_MODEL)
    chunks = client.chat.completions.create(
        model=served[0],
        messages=[{"role": "user", "content": question}],
        temperature=0,  # random sampling quickly derails a small model
        stream=True,
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
