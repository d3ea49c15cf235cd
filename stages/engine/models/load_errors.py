"""Messages for models and tokenizers that cannot be loaded: one line with what must hold, what was got, what to try."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version

from stages.engine.checkpoints.size_check import find_file
from store.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@contextmanager
def explain_errors(what: str, source: str) -> Iterator[None]:
    """Raise every error of loading as one line: libraries raise almost anything for a file that is not right."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(_load_error(what, source, error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the tokenizer library
            raise
        raise ModelError(_load_error(what, source, RuntimeError(str(error)))) from error


def _load_error(what: str, source: str, error: Exception) -> str:
    """Return one line: what must hold, what was got, what to try."""
    reason, config = _first_line(error), read_config(source)
    if what == "tokenizer":
        return _tokenizer_error(source, reason)
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method and not isinstance(error, ImportError):
        return f"{source!r}, quantised with {method}, must load here, but: {reason}; name it unquantised or as GGUF"
    fault = _architecture_fault(config, reason)
    if fault:
        return f"{source!r} must be a causal language model that transformers {transformers_version} has, but {fault}"
    if isinstance(error, ImportError):
        return f"{source!r} needs a package that is not installed: {reason}"
    if config:
        kind = config.get("model_type")
        return f"{source!r} must load as a model of the type {kind!r}, but: {reason}; fetch it again, or name another"
    return _not_found(what, source, reason)


def _not_found(what: str, source: str, reason: str) -> str:
    path = Path(source)
    where = "the folder" if path.is_dir() else "the file" if path.is_file() else "no folder of that name, and the hub"
    return (
        f"a {what} must load from {source!r}: {where} did not give one ({reason}); name a folder that save_pretrained "
        "wrote, a .gguf file, a hub model that this machine can reach, or builtin:NAME"
    )


def _architecture_fault(config: Mapping[str, Any], reason: str) -> str | None:
    """Return why `transformers` has no causal language model for a configuration; None if it has one."""
    kind = config.get("model_type")
    if "auto_map" in config and (kind not in CONFIG_MAPPING or "custom code" in reason):
        return f"its type {kind!r} comes with code of its own, which is never executed; name another model"
    if kind and kind not in CONFIG_MAPPING:
        return f"its type is {kind!r}; try pip install --upgrade transformers, or name another model"
    if "Unrecognized configuration class" in reason:
        return f"its type {kind!r} generates no text from text alone; name another model"
    return None


def _tokenizer_error(source: str, reason: str) -> str:
    folder = Path(source)
    if folder.is_dir() and not (folder / "tokenizer.json").exists():
        reason = "it has no tokenizer.json"
        if (folder / "tokenizer.model").exists():
            package = "tiktoken" if is_tiktoken(folder) else "sentencepiece"
            lacking = find_spec(package) is None
            reason += (
                f"; to convert its tokenizer.model: pip install {package}" if lacking else ", and no other that fits"
            )
        elif (folder / "tekken.json").exists() or any(folder.glob("*.tiktoken")):
            reason += "; transformers cannot convert tekken.json and *.tiktoken"
    return _not_found("tokenizer", source, reason)


def is_tiktoken(folder: Path) -> bool:
    """Check whether `tokenizer.model` is of tiktoken's kind: lines of a token in base 64 and its rank."""
    with (folder / "tokenizer.model").open("rb") as file:
        return bool(re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(1000)))


def _first_line(error: Exception, longest: int = 300) -> str:
    """Return the first line of a message, cut between words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    says_what = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    line = lines[0] if says_what else f"{type(error).__name__}: {lines[0]}"
    return line if len(line) <= longest else f"{line[:longest].rsplit(' ', 1)[0]} ..."


def read_config(source: str) -> dict[str, Any]:
    """Return the configuration of a folder or cached hub model as it is written; empty if there is none."""
    path = find_file(source, "config.json")
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
