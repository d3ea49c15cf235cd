"""Files of a run and of a version, and the names of their keys, columns and tensors."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyarrow import parquet
from safetensors import safe_open
from shapes import shape_of_json, shape_of_lines

Golden = Callable[[str, Any], None]
NUMBER = re.compile(r"\d+")


def names(folder: Path) -> list[str]:
    """Names of the files below a folder, with a placeholder for numbers, which are data."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted({re.sub(r"\d{6}", "<number>", name) for name in files})


def tensors(path: Path) -> dict[str, str]:
    """Names of tensors with their types and dimensions; names that differ only by numbers are merged."""
    with safe_open(path, framework="numpy") as content:
        found = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  (not a dict)
        kinds: dict[str, set[str]] = {}
        for name, one in found.items():
            kind = f"{one.get_dtype()} of {len(one.get_shape())} dimensions"
            kinds.setdefault(NUMBER.sub("<number>", name), set()).add(kind)
    return {name: " | ".join(sorted(of)) for name, of in kinds.items()}


def columns(path: Path) -> list[str]:
    """Names and types of the columns of a Parquet file."""
    return [f"{field.name}: {field.type}" for field in parquet.read_schema(path)]


def test_files_of_a_finished_run(golden: Golden, small_run: Path) -> None:
    golden("files-of-a-run", names(small_run))


def test_json_files_of_a_run(golden: Golden, small_run: Path, resumed: Path, unfinished: Path) -> None:
    files = ("config.json", "mlflow.json", "summary.json", "log/manifest.json")
    found = {name: shape_of_json(small_run / name) for name in files}
    found["log/manifest.json of an unfinished run"] = shape_of_json(unfinished / "log" / "manifest.json")
    found["rejected.jsonl"] = shape_of_lines(resumed / "rejected.jsonl")
    golden("json-of-a-run", found)


def test_files_of_a_version(golden: Golden, small_run: Path) -> None:
    version = max((small_run / "versions").iterdir())
    golden(
        "version",
        {
            "files": names(version),
            "manifest.json": shape_of_json(version / "manifest.json"),
            "head.safetensors": tensors(version / "head.safetensors"),
            "model.safetensors": tensors(version / "model.safetensors"),
            "ngrams.parquet": columns(version / "ngrams.parquet"),
        },
    )


def format_of(checkpoint: Path) -> dict[str, Any]:
    """Names, keys and tensors of a checkpoint, without lengths and values."""
    return {
        "files": names(checkpoint),
        "format": json.loads((checkpoint / "state.json").read_bytes())["format"],
        "state.json": shape_of_json(checkpoint / "state.json"),
        "tensors.safetensors": tensors(checkpoint / "tensors.safetensors"),
        "weights.safetensors": tensors(checkpoint / "weights.safetensors"),
    }


def test_format_of_a_checkpoint(golden: Golden, unfinished: Path) -> None:
    checkpoint = max((unfinished / "checkpoint").iterdir())
    content = json.loads((checkpoint / "state.json").read_bytes())
    assert len(content["rows"]) == 3, "sequences in flight"
    assert content["examples"], "without every part the frozen format would be incomplete"
    assert any("entries" in one and one["entries"] for one in content["shared"]), "n-grams"
    golden("checkpoint", format_of(checkpoint))
