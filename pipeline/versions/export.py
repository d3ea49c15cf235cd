"""`omnidraft versions export`: writes a version as a drafter that other engines load; the folder appears complete or
not at all.

A model card is added: Markdown with the metadata that the Hugging Face hub reads.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.assembly.cache import NGRAM_FILE
from pipeline.assembly.models import locate
from pipeline.assembly.stages import HEAD_FILE
from pipeline.reports.terminal import new_folder, to_printable
from stages.engine.models.adapters import ADAPTER_FOLDER, merge_lora
from stages.engine.models.huggingface import load_causal_model, load_tokenizer, raise_write_errors, read_licence
from store.errors import OmnidraftError
from store.registry.registered_version import VersionDetails, find_lineage
from store.registry.registry import fetch_version, list_versions, show_version
from store.registry.version_folder import MANIFEST

OWN_FOLDER = "omnidraft"  # vLLM loads every safetensors file next to the model as a part of it
DRAFT_LENGTH = 5

ENGINES = Path(__file__).with_name("engines.md").read_text(encoding="utf-8")  # how each engine takes the drafter

# Values that may be put into code that people copy: none ends a quoted text, begins an option or is special in a shell.
NAME = r"\w[\w.-]*"
HUB = rf"{NAME}(/{NAME})?"
TARGET = r"(builtin:|models:/)?[\w./@][\w./@-]*"

PROBE = (
    "`acceptance` is the share of the target's greedy tokens, on prompts that never change, that the drafter predicts; "
    "`window_acceptance` is that of the run's own prompts since the version before. An engine with one vocabulary for "
    "both accepts about that share of the tokens that it judges; one that translates between two by re-tokenising text "
    "accepts less."
)


def export_version(uri: str, name: str, number: int, into: Path) -> Path:
    """Write a registered version into a new or empty folder: drafter, tokenizer, model card, cache and head.

    Every byte is checked against the version's manifest before any of it is read as a model.
    """
    with new_folder(into) as free:
        details, lineage = show_version(uri, name, number), find_lineage(number, list_versions(uri, name))
        free.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=free.parent, prefix=f".{free.name}-") as scratch:
            version = fetch_version(f"models:/{name}/{number}", uri, Path(scratch) / "version")
            part = Path(scratch) / "part"
            parameters = export_drafter(version, part, DRAFT_LENGTH)
            own = part / OWN_FOLDER
            own.mkdir()
            for file in (HEAD_FILE, NGRAM_FILE, MANIFEST):
                if (version / file).is_file():
                    shutil.copyfile(version / file, own / file)
            licence = _read_licence(details.manifest["drafter"], uri, Path(scratch) / "source")
            card = make_card(details, lineage, free.name, parameters, licence)
            (part / "README.md").write_text(card, encoding="utf-8")
            part.replace(free)
    return into


def load_plain_drafter(version: Path) -> tuple[Any, Any]:
    """The drafter of a version's folder as a model and tokenizer of `transformers`, on the CPU and in the type that it
    was saved in; an adapter that it was saved with is merged. The files must have been checked.
    """
    model, tokenizer = load_causal_model(str(version), "auto", "cpu"), load_tokenizer(str(version))
    if (version / ADAPTER_FOLDER).is_dir():
        model = merge_lora(model, str(version / ADAPTER_FOLDER))
    return model, tokenizer


def export_drafter(version: Path, into: Path, draft_length: int) -> int:
    """Write the drafter of a checked version folder to another folder; return its number of parameters.

    `draft_length`: pieces per draft for `transformers`, instead of its default of 20.
    """
    model, tokenizer = load_plain_drafter(version)
    model.generation_config.update(num_assistant_tokens=draft_length, num_assistant_tokens_schedule="constant")
    with raise_write_errors(into):
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    return sum(parameter.numel() for parameter in model.parameters())


def _read_licence(drafter: str, uri: str, scratch: Path) -> str | None:
    """Read the licence of the run's first drafter; a drafter that was a version itself is not fetched again for it."""
    try:
        return None if drafter.startswith("models:/") else read_licence(locate(drafter, uri, scratch))
    except OmnidraftError:  # the drafter was removed or changed
        return None


def make_card(
    details: VersionDetails, lineage: Sequence[int], folder: str, parameters: int, licence: str | None = None
) -> str:
    """Return a model card. Texts from the registry are in code or tables, each on one line.

    Args:
        lineage: numbers from the version back to its baseline.
        folder: name of the drafter's folder.
        parameters: of the drafter.
        licence: of the run's first drafter; None if its card names none.
    """
    manifest, number = details.manifest, details.summary.number
    target, name = manifest["target"], manifest["name"]
    engines = ENGINES.format(
        model=target if re.fullmatch(HUB, target) else "TARGET",
        target=target if re.fullmatch(TARGET, target) else "TARGET",
        folder=folder if re.fullmatch(NAME, folder) else "DRAFTER",
        length=DRAFT_LENGTH,
        name=name if re.fullmatch(NAME, name) else "NAME",
        number=number,
    )
    metrics = [(key, f"{value:.4g}") for key, value in sorted(details.metrics.items())]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            *([f"license: {json.dumps(_escape(licence))}"] if licence else []),
            *("tags:", "- speculative-decoding", "- draft-model", "- omnidraft", "---", ""),
            f"# {_escape(name)}, version {number}",
            "",
            f"A drafter for speculative decoding with the target `{_escape(target)}`, published by omnidraft "
            "while a stream of prompts ran. It proposes tokens; the target decides, so that text keeps the "
            "target's distribution.",
            "",
            *_format_table("metric", "value", [*metrics, ("parameters", f"{parameters:,}")]),
            *([PROBE, ""] if "acceptance" in details.metrics else []),
            *_format_table("origin", "", _list_origin(details, lineage, licence)),
            "`omnidraft/` holds what other engines do not read: `ngrams.parquet` (target tokens that are spelt by "
            "several of the drafter's pieces: `pieces`, `token`, `count`), `head.safetensors` (the head that ends "
            "drafts) and `manifest.json` (the sha256 of the version's files).",
            "",
            "## Use",
            engines,
        ]
    )


def _list_origin(details: VersionDetails, lineage: Sequence[int], licence: str | None) -> list[tuple[str, str]]:
    summary, params, manifest = details.summary, details.params, details.manifest
    origin: Mapping[str, object] = {
        "run": manifest["run"],
        "stream offset": manifest["offset"],
        "changed since its parent": summary.changes,
        "prompts since its parent": details.tags.get("prompts"),
        "responds to the": details.tags.get("drift"),
        "published because of": summary.reason,
        "published at": manifest["created_at"],
        "began as": manifest["drafter"],
        "loss": params.get("loss"),
        "temperature": params.get("temperature"),
        "lineage": " from ".join(map(str, lineage)),
        "datasets": details.tags.get("datasets"),
        "licence of the drafter": licence or "not named by its card",
        "digest": manifest["digest"],
    }
    return [(name, str(value)) for name, value in origin.items() if value not in (None, "")]


def _format_table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {first} | {second} |", "|---|---|", *(f"| {_escape(a)} | {_escape(b)} |" for a, b in rows), ""]


def _escape(text: str) -> str:
    """Return one to_printable line that ends no table cell and no code."""
    return to_printable(text).replace("|", "\\|").replace("`", "'")
