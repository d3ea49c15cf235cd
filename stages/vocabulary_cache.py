"""What is read of tokenizers, kept on disk: views of vocabularies, and pairs of them.

The folder is `$OMNIDRAFT_CACHE`, else `$XDG_CACHE_HOME/omnidraft`, else `~/.cache/omnidraft`. A file is written whole
under a name that says what it was made from. One that cannot be read, or is not what its name says, is made anew; a
folder that cannot be written is no cache. Files are compressed numpy arrays, and nothing is unpickled.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from huggingface_hub import try_to_load_from_cache

from stages.token_bytes import Roles, TokenView, flattened, states

FORMAT = 1  # goes up when what is stored, or how it is made, changes
_SAMPLES = 256  # tokens that are compared with a tokenizer in memory


Arrays = Mapping[str, npt.NDArray[Any]]


def folder() -> Path | None:
    """Where the files lie; None on a machine without a home."""
    if os.environ.get("OMNIDRAFT_CACHE"):
        return Path(os.environ["OMNIDRAFT_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "omnidraft"
    try:
        return Path.home() / ".cache" / "omnidraft"
    except RuntimeError:
        return None


def digest_of(*parts: object) -> str:
    """sha256 of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def recall(kind: str, key: str, restore: Callable[[Arrays], Any]) -> Any | None:
    """What `restore` makes of the arrays kept under a key; None if there are none, or they are not right."""
    path = _path(kind, key)
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in kept.files}
        if str(arrays["key"]) != _seal(kind, key):
            return None
        return restore(arrays)
    except Exception:  # damage shows in many ways; whatever it is, the file is made anew
        return None


def keep(kind: str, key: str, arrays: Arrays) -> None:
    """Write arrays under a key, whole or not at all; without an effect where the folder cannot be written."""
    path = _path(kind, key)
    if path is None:
        return
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                np.savez_compressed(file, key=np.array(_seal(kind, key)), **arrays)  # type: ignore[arg-type]
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _path(kind: str, key: str) -> Path | None:
    root = folder()
    return None if root is None else root / f"{kind}-{key[:32]}.npz"


def _seal(kind: str, key: str) -> str:
    return f"omnidraft {kind} {FORMAT} {key}"


def view_of(tokenizer: Any, roles: Roles, read: Callable[[], TokenView]) -> TokenView:
    """The view of a tokenizer, from disk or as `read` gives it; then it is kept."""
    key = _tokenizer_key(tokenizer, roles)
    view: TokenView | None = recall("vocabulary", key, _restored_view)
    if view is None:
        view = read()
        keep("vocabulary", key, _arrays_of(view))
    return view


def _tokenizer_key(tokenizer: Any, roles: Roles) -> str:
    """Names what a view depends on. The file stands for the model where there is one: that is read in no time.

    A tokenizer may have been changed since it was loaded, so what can be asked of it quickly is part of the key.
    """
    backend = tokenizer.backend_tokenizer
    path = _file_of(tokenizer)
    content = path.read_bytes() if path else backend.to_str().encode()
    size = backend.get_vocab_size(with_added_tokens=True)
    sampled = [backend.id_to_token(index) for index in range(0, size, size // _SAMPLES + 1)]
    added = [(index, token.content, token.special) for index, token in backend.get_added_tokens_decoder().items()]
    return digest_of(hashlib.sha256(content).hexdigest(), vars(roles), size, sampled, sorted(added), states(backend))


def _file_of(tokenizer: Any) -> Path | None:
    """The tokenizer.json that a tokenizer was loaded from: in its folder, or in the hub's cache."""
    source = str(tokenizer.name_or_path)
    if not source:
        return None
    path = Path(source) / "tokenizer.json"
    if path.is_file():
        return path
    try:
        cached = try_to_load_from_cache(source, "tokenizer.json")
    except ValueError:  # no name that the hub allows
        return None
    return Path(cached) if isinstance(cached, str) else None


def _arrays_of(view: TokenView) -> Arrays:
    lengths, spelt = flattened(view.token_bytes)
    return {
        "lengths": lengths,
        "bytes": np.frombuffer(spelt, dtype=np.uint8),
        "preferred": view.preferred,
        "controls": np.frombuffer(json.dumps(view.controls).encode(), dtype=np.uint8),
        "digest": np.array(view.digest),
    }


def _restored_view(arrays: Arrays) -> TokenView:
    lengths, spelt = arrays["lengths"].tolist(), arrays["bytes"].tobytes()
    ends = np.maximum(arrays["lengths"], 0).cumsum().tolist()
    places = zip(lengths, ends, strict=True)
    token_bytes = tuple(None if length < 0 else spelt[end - length : end] for length, end in places)
    return TokenView(token_bytes, arrays["preferred"], json.loads(arrays["controls"].tobytes()), str(arrays["digest"]))
