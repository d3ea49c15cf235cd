"""Helpers of the tests of prompt sources."""

import io
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from pipeline.config.sections import SourceSettings
from pipeline.sources.stream import open_source
from store.events import PromptReceived, PromptRejected

PLAIN = SourceSettings()
GOOD = b'{"prompt": "good"}\n'


def read(spec: Path | str, stdin: bytes = b"", **options: object) -> list[PromptReceived | PromptRejected]:
    with patch("sys.stdin", SimpleNamespace(buffer=io.BytesIO(stdin))):
        return list(open_source(str(spec), SourceSettings(**options)).read(0))


def list_texts(events: list[PromptReceived | PromptRejected]) -> list[str]:
    return [event.text for event in events if isinstance(event, PromptReceived)]


def list_rejections(events: list[PromptReceived | PromptRejected]) -> list[tuple[int, str]]:
    return [(event.line, event.reason) for event in events if isinstance(event, PromptRejected)]


def write_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
