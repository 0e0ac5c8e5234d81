"""Compares three sentences by their embeddings' cosine similarity, using OpenAI's client.

Run `make up` first, then `.venv/bin/python examples/embed.py`. To use a different address or a key,
set PENSTOCK_URL and PENSTOCK_API_KEY.
"""

from __future__ import annotations

import os
from itertools import combinations

import numpy as np
from openai import OpenAI

URL = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8080")
SENTENCES = ["A cat sleeps on the mat.", "A kitten naps on the rug.", "The bank raised its rates."]


def main() -> None:
    """Prints the cosine similarity for each pair of sentences."""
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("PENSTOCK_API_KEY", "any"))
    reply = client.embeddings.create(model="all-MiniLM-L6-v2", input=SENTENCES)
    vectors = [np.array(item.embedding) for item in reply.data]
    for first, second in combinations(range(len(SENTENCES)), 2):
        # The vectors have length 1, so their dot product is the cosine.
        cosine = float(vectors[first] @ vectors[second])
        print(f"{cosine:6.3f}  {SENTENCES[first]} / {SENTENCES[second]}")


if __name__ == "__main__":
    main()
