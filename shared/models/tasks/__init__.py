"""The registry of tasks.

Each task has one file here, and one with the same name in api/tasks and in workers/tasks.
docs/how-to/adding-a-task.md shows how to add one.
"""

from __future__ import annotations

from shared.models.tasks.base import Task
from shared.models.tasks.custom import CUSTOM, CustomInput, CustomResult
from shared.models.tasks.embedding import (
    EMBEDDING,
    EmbeddingResult,
    TextInput,
    TextTokens,
    TextToTokenize,
    TokensInput,
)
from shared.models.tasks.image import (
    IMAGE,
    ImageInput,
    ImageResult,
    ImagesInput,
    ImagesResult,
)
from shared.models.tasks.similarity import SIMILARITY, SimilarityInput, SimilarityResult
from shared.models.tasks.text import (
    TEXT,
    GenerationInput,
    GenerationResult,
    PromptToCount,
    TokenCount,
)

Input = (
    TextInput
    | TokensInput
    | TextToTokenize
    | ImageInput
    | ImagesInput
    | SimilarityInput
    | GenerationInput
    | PromptToCount
    | CustomInput
)
Result = (
    EmbeddingResult
    | TextTokens
    | ImageResult
    | ImagesResult
    | SimilarityResult
    | GenerationResult
    | TokenCount
    | CustomResult
)
TASKS: dict[str, Task] = {task.name: task for task in (EMBEDDING, IMAGE, SIMILARITY, TEXT, CUSTOM)}
