"""Object stores: where they are, and reading, writing, listing and removing their objects.

`s3://BUCKET/PATH` is any store that speaks S3's protocol, `gs://BUCKET/PATH` Google's; both through pyarrow. Keys, the
address of the server and the region come from the variables that Amazon's own tools read; see docs/object-store.md.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

import pyarrow.fs as pafs

from store.errors import OmnidraftError, RunError

CHUNK = 8 << 20  # bytes that are read or written at a time
CONNECT_SECONDS, ATTEMPTS = 5.0, 6  # six attempts wait some twenty seconds together
_PLACE_OPTIONS = frozenset({"endpoint_override", "region", "scheme"})


class ObjectStore:
    """The objects below one URI. May be used by several threads.

    An object appears whole or not at all. Every method tries again for a while when the store does not answer; then it
    raises OmnidraftError.

    Raises:
        RunError: the URI names no place below a bucket, holds keys, or has an option that is not known.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        options = dict(parse_qsl(parts.query))
        path = parts.path.strip("/")
        plain = "@" not in parts.netloc and not {"", ".", ".."} & set(path.split("/")) and "\\" not in path
        if not parts.netloc or not plain or options.keys() - _PLACE_OPTIONS:
            raise RunError(
                "a run on an object store must be named s3://BUCKET/PATH, with nothing behind it but "
                "?endpoint_override=HOST:PORT, scheme= and region=, and its keys must be in the environment; "
                f"got {parts.scheme}://...{parts.path}"
            )
        self._root = f"{parts.netloc}/{path}"
        try:
            self._files = _s3(options) if parts.scheme == "s3" else pafs.FileSystem.from_uri(uri)[0]
        except (OSError, ValueError) as error:
            raise RunError(f"{uri} must be an object store that can be opened, but: {error}") from error

    def read(self, name: str) -> bytes | None:
        """A small object; None if there is none."""
        try:
            return b"".join(self.chunks(name))
        except FileNotFoundError:
            return None

    def chunks(self, name: str) -> Iterator[bytes]:
        """An object's content, piece by piece. Raises FileNotFoundError if there is none."""
        with self._telling("read", name), self._files.open_input_stream(f"{self._root}/{name}") as stream:
            while chunk := stream.read(CHUNK):
                yield chunk

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Put an object there, in the place of another."""
        with self._telling("write", name), self._files.open_output_stream(f"{self._root}/{name}") as stream:
            for chunk in chunks:
                stream.write(chunk)

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder; nothing where there is none."""
        selected = pafs.FileSelector(f"{self._root}/{folder}", allow_not_found=True)
        with self._telling("list", folder):
            return [found.base_name for found in self._files.get_file_info(selected)]

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        try:
            with self._telling("remove", name):
                self._files.delete_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass

    @contextmanager
    def _telling(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OmnidraftError(f"could not {what} {name} of {self.uri}: {error}") from error


def _s3(options: dict[str, str]) -> pafs.S3FileSystem:
    """What pyarrow does not read of the environment itself is read here."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS") or ATTEMPTS)
    return pafs.S3FileSystem(
        **({"endpoint_override": endpoint, "region": region} | options),
        connect_timeout=CONNECT_SECONDS,
        allow_delayed_open=True,  # a small object is one request
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=attempts),
    )
