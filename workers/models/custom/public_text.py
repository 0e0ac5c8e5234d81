"""Removes this machine's paths from the errors and logs that a class's caller reads.

The author's own words remain unchanged. Only Python's folders and the folders in which we run the
class are removed, so a traceback shows `predict.py` and `PIL/Image.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from shared.messages import PrintedLogs
from workers.models.custom.printed import MAX_LOG_CHARS

MAX_PATH_CHARS = 4096
"""Longer words are not held back, because they can't be paths (PATH_MAX on Linux)."""
_SEPARATORS = r"\s'\"`()\[\]{}<>|:,;="
_STARTED = (
    r"(?:(?<![\w.~/-])|(?<=://)|(?<=:///)|(?<=\x1b\[\dm)|(?<=\x1b\[\d\dm)|(?<=[\s'\"]-[A-Z]))"
)
"""The start of a path. It isn't part of a longer path, but may follow a URL's scheme, a color code,
or a flag such as `-I`.
"""
_PYTHON = rf"(?<![^{_SEPARATORS}])[^{_SEPARATORS}]*/lib/python\d\.\d+/(?:(?:site|dist)-packages/)?"
"""Matches from the start of a word, so that a long word is scanned only once."""
_BEGUN = re.compile(rf"{_STARTED}(/(?!/)[^{_SEPARATORS}]*)\Z")
_ENDED = r"(?![\w-]|\.\w)"
"""The end of a folder name."""


class PathRemover:
    """Removes folders from texts.

    Args:
        scratch: the process's scratch folder, or None if there is none. The class's working folders
            and the folders of its input files, all of which are under it, are removed too.
        folders: other folders to remove, such as the class's folder.
    """

    def __init__(self, scratch: Path | None, folders: Iterable[Path]) -> None:
        known = {str(form) for folder in folders for form in (folder, folder.resolve())}
        # Longest first, because one folder may be inside another.
        known_forms = [
            re.escape(path) for path in sorted(known, key=len, reverse=True) if path != "/"
        ]
        if scratch is not None:
            known_forms = [rf"{re.escape(str(scratch))}(?:/src|/prediction-\w+/\d+)?", *known_forms]
        # Group 1 is empty if a folder is not followed by the rest of a path. `(?!)` never matches.
        known_folder = "|".join(known_forms) or "(?!)"
        self._paths = re.compile(rf"{_STARTED}(?:{known_folder})(/|{_ENDED})|{_PYTHON}")

    def remove(self, text: str) -> str:
        """Returns the text with the folders removed. A folder on its own becomes a dot."""
        return self._paths.sub(lambda match: "." if match[1] == "" else "", text)


class PublicLogs:
    """One prediction's output as its caller may see it, with positions in that text."""

    def __init__(self, paths: PathRemover) -> None:
        self._paths = paths
        self._seen = 0
        """Number of printed characters received so far."""
        self._held = ""
        """The start of a possible path, held back until the rest arrives."""
        self.printed = PrintedLogs()

    def add(self, printed: PrintedLogs, *, is_all: bool = False) -> PrintedLogs:
        """Handles what the process has printed since the prediction started.

        Args:
            printed: all of the output so far, or just the end if it is long.
            is_all: True if nothing follows. Otherwise, a path that may continue in later output is
                held back.
        """
        text, left_out = self.printed.text, self.printed.left_out
        if (missing := printed.left_out - self._seen) > 0:
            left_out += len(text) + len(self._held) + missing
            text, self._held = "", ""
        new = self._held + printed.text[max(0, self._seen - printed.left_out) :]
        self._seen = printed.end
        partial_path = None if is_all else _BEGUN.search(new, max(0, len(new) - MAX_PATH_CHARS))
        whole = len(new) if partial_path is None else partial_path.start(1)
        self._held = new[whole:]
        text += self._paths.remove(new[:whole])
        extra = max(0, len(text) - MAX_LOG_CHARS)
        self.printed = PrintedLogs(text[extra:], left_out + extra)
        return self.printed
