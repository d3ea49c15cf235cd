"""Rows that come from no file of the user's: the built-in streams and the Hugging Face hub."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from pipeline import corpus
from pipeline.source_rows import Row, nearest
from store.errors import SourceError

BUILTIN_STREAMS = ("docs", "code")
HUB_SPEC = re.compile(r"hf://(?P<owner>[^/:]+)/(?P<name>[^/:]+)(?:/(?P<config>[^:]+))?:(?P<split>[^:]+)")


class BuiltinRows:
    """A built-in stream, made from this Python's standard library and shuffled by `seed`."""

    columns: Collection[str] = ("prompt_id", "prompt", "reference")

    def __init__(self, kind: str, seed: int):
        if kind not in BUILTIN_STREAMS:
            known = ", ".join(f"'builtin:{name}'" for name in BUILTIN_STREAMS)
            hint = nearest(f"builtin:{kind}", (f"builtin:{name}" for name in BUILTIN_STREAMS))
            raise SourceError(f"A built-in source must be one of {known}, got 'builtin:{kind}'.{hint}")
        self._kind = kind
        self._seed = seed

    def count(self) -> int:
        """The exact number of passages."""
        return len(self._passages)

    def read(self, columns: Collection[str]) -> Iterator[Row]:
        """As `Rows.read`."""
        for line, passage in enumerate(self._passages, start=1):
            name = f"{passage.name}:{line}"  # overloads and properties share a name
            yield Row(line, {"prompt_id": name, "prompt": passage.prompt, "reference": passage.rest})

    @cached_property
    def _passages(self) -> list[corpus.Passage]:
        return corpus.stream(self._kind, self._seed)


class HubRows:
    """One split of a dataset on the Hugging Face hub, streamed by the `datasets` library."""

    def __init__(self, spec: str):
        found = HUB_SPEC.fullmatch(spec)
        if not found:
            raise SourceError(f"A hub source must be 'hf://owner/dataset[/config]:split', got '{spec}'.")
        self._spec = spec
        self.dataset = found["name"]
        load_dataset = _datasets(spec).load_dataset
        with self._reachable():
            self._rows: Iterable[Mapping[str, object]] = load_dataset(
                f"{found['owner']}/{found['name']}", found["config"], split=found["split"], streaming=True
            )
            self.columns: Collection[str] | None = getattr(self._rows, "column_names", None)

    def count(self) -> None:
        """Unknown: the hub streams."""

    def read(self, columns: Collection[str]) -> Iterator[Row]:
        """As `Rows.read`."""
        with self._reachable():
            for line, values in enumerate(self._rows, start=1):
                yield Row(line, values)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever its network, file and dataset code raises: there is no common base
            what = f"{type(error).__name__}: {error}"
            hint = "Check the name, the split and the network, or download a file and name that."
            raise SourceError(f"The hub source '{self._spec}' cannot be read: {what}. {hint}") from error


def _datasets(spec: str) -> Any:
    try:
        import datasets
    except ImportError:
        needed = "needs the optional extra 'hub'"
        raise SourceError(f"The hub source '{spec}' {needed}. Try: pip install 'omnidraft[hub]'") from None
    return datasets
