"""Client of object stores: read, write, list and remove objects.

`s3://BUCKET/PATH` is any store that speaks S3's protocol, `gs://BUCKET/PATH` Google's store; both go through pyarrow.
Keys, the address of the server and the region come from the variables of Amazon's own tools; see docs/operate.md.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

import pyarrow.fs as pafs

from store.errors import OmnidraftError, RunError

CHUNK = 8 << 20  # bytes per read or write
CONNECT_SECONDS, ATTEMPTS = 5.0, 6  # six attempts wait about twenty seconds in total
_PLACE_OPTIONS = frozenset({"endpoint_override", "region", "scheme"})


class ObjectStore:
    """The objects below one URI. Thread-safe.

    Objects are written atomically. If the store does not answer, every method retries for a while and then raises
    OmnidraftError.

    Raises:
        RunError: the URI has no path below a bucket, contains keys, or has an unknown option.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        options = dict(parse_qsl(parts.query))
        path = parts.path.strip("/")
        plain = "@" not in parts.netloc and not {"", ".", ".."} & set(path.split("/")) and "\\" not in path
        if not parts.netloc or not plain or options.keys() - _PLACE_OPTIONS:
            raise RunError(
                "a run on an object store must be named s3://BUCKET/PATH, with no options but "
                "?endpoint_override=HOST:PORT, scheme= and region=, and its keys must be in the environment; "
                f"got {parts.scheme}://...{parts.path}"
            )
        self._root = f"{parts.netloc}/{path}"
        try:
            self._files = _s3(options) if parts.scheme == "s3" else pafs.FileSystem.from_uri(uri)[0]
        except (OSError, ValueError) as error:
            raise RunError(f"{uri} must be an object store that can be opened, but: {error}") from error

    def read(self, name: str) -> bytes | None:
        """Read a small object; None if there is none."""
        try:
            return b"".join(self.chunks(name))
        except FileNotFoundError:
            return None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of an object in chunks. Raises FileNotFoundError if there is none."""
        with self._convert_errors("read", name), self._files.open_input_stream(f"{self._root}/{name}") as stream:
            while chunk := stream.read(CHUNK):
                yield chunk

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write an object, or replace it."""
        with self._convert_errors("write", name), self._files.open_output_stream(f"{self._root}/{name}") as stream:
            for chunk in chunks:
                stream.write(chunk)

    def names(self, folder: str) -> list[str]:
        """List the names directly in a folder; empty if the folder does not exist."""
        selected = pafs.FileSelector(f"{self._root}/{folder}", allow_not_found=True)
        with self._convert_errors("list", folder):
            return [found.base_name for found in self._files.get_file_info(selected)]

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        try:
            with self._convert_errors("remove", name):
                self._files.delete_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass

    @contextmanager
    def _convert_errors(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OmnidraftError(f"could not {what} {name} of {self.uri}: {error}") from error


def _s3(options: dict[str, str]) -> pafs.S3FileSystem:
    """Open S3 with the variables of the environment that pyarrow does not read itself."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS") or ATTEMPTS)
    return pafs.S3FileSystem(
        **({"endpoint_override": endpoint, "region": region} | options),
        connect_timeout=CONNECT_SECONDS,
        allow_delayed_open=True,  # a small object is one request
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=attempts),
    )
