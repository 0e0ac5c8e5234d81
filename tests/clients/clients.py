"""The clients to run, and their pinned versions.

pip versions are pinned by hashed requirements, and npm versions by a package-lock.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent
REQUIREMENTS = FOLDER / "python/requirements"
NODE = FOLDER / "node"


@dataclass(frozen=True)
class Client:
    """A client, which runs in its own environment.

    Args:
        name: names the environment, and the file or folder with the pinned versions.
        package: the package whose version is shown.
        script: the module or file with the checks, without its suffix.
        class_script: the module or file with checks for custom classes. Empty: there are none.
        needs_documents: True if its checks read documents. examples/ocr/test_ocr.py runs those
            checks against the shipped document model.
    """

    name: str
    package: str
    script: str
    language: Literal["python", "node"] = "python"
    class_script: str = ""
    needs_documents: bool = False

    @property
    def title(self) -> str:
        return f"{self.package} (Node)" if self.language == "node" else self.package

    @property
    def with_classes(self) -> Client:
        """The same client with the checks for custom classes."""
        return replace(self, script=self.class_script)

    @property
    def pinned(self) -> Path:
        """The file that pins this client and everything it needs."""
        if self.language == "node":
            return NODE / self.name / "package-lock.json"
        return REQUIREMENTS / f"{self.name}.txt"

    @property
    def version(self) -> str:
        """Looks up the client's version in the file that pins it."""
        if self.language == "node":
            packages = json.loads(self.pinned.read_text())["packages"]
            return str(packages[f"node_modules/{self.package}"]["version"])
        found = re.search(rf"^{re.escape(self.package)}==(\S+)", self.pinned.read_text(), re.M)
        assert found is not None, f"{self.pinned} does not pin {self.package}"
        return found[1]


CLIENTS = (
    Client("openai-1", "openai", "openai_checks", class_script="audio_checks"),
    Client("openai-2", "openai", "openai_checks", class_script="audio_checks"),
    Client("openai-3", "openai", "openai_checks", class_script="audio_checks"),
    Client("replicate", "replicate", "replicate_checks", class_script="class_checks"),
    Client("langchain", "langchain-openai", "langchain_checks"),
    Client("cohere", "cohere", "cohere_checks"),
    Client("llama-index", "llama-index-embeddings-openai-like", "llama_index_checks"),
    Client("haystack", "haystack-ai", "haystack_checks"),
    Client("litellm", "litellm", "litellm_checks"),
    Client("litellm-proxy", "litellm", "litellm_proxy_checks"),
    Client("anthropic", "anthropic", "anthropic_checks"),
    Client("mistral", "mistralai", "mistral_checks", needs_documents=True),
    Client("openai-agents", "openai-agents", "openai_agents_checks"),
    Client("instructor", "instructor", "instructor_checks"),
    Client("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_checks"),
    Client("dbt", "dbt-bigquery", "dbt_checks"),
    Client("pandas-gbq", "pandas-gbq", "pandas_gbq_checks"),
    Client("openai-node-6", "openai", "openai_checks", "node", "audio_checks"),
    Client("openai-node-7", "openai", "openai_checks", "node", "audio_checks"),
    Client("replicate-node", "replicate", "replicate_checks", "node", "class_checks"),
    Client("ai-sdk-6", "ai", "ai_sdk_checks", "node"),
    Client("ai-sdk-7", "ai", "ai_sdk_checks", "node"),
    Client("pubsub-node", "@google-cloud/pubsub", "pubsub_checks", "node"),
)


def client_of(name: str) -> Client:
    (found,) = (one for one in CLIENTS if one.name == name)
    return found
