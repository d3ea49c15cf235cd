"""Arms of the benchmark: what drafts, as vLLM's speculative configuration and settings of the plugin."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.models.catalog import path_of

PROPOSER = "pipeline.vllm_plugin.proposer.OmnidraftProposer"
PLAIN = "plain"
HEAD = "head.safetensors"  # of a drafter
FLAT = "[[1, 1.0], [1000, 1.0]]"  # costs of passes: every draft that may be accepted pays
CHEAP = "0.01"  # cost of a drafter pass, relative to these


@dataclass(frozen=True)
class ArmRequest:
    """What all arms of a benchmark have in common."""

    drafts: int  # maximum number of drafted tokens per request and pass
    model_drafts: int  # the same of vLLM's draft-model mode, which always drafts as many
    drafter: str  # drafter model, which the arms with a model share
    folder: Path  # where the arms keep runs


@dataclass(frozen=True)
class VllmArm:
    """One way of drafting."""

    speculative: Mapping[str, Any] | None  # vLLM's speculative configuration; None to draft nothing
    settings: Mapping[str, str] = field(default_factory=dict)  # of the plugin, by name

    def environment(self) -> dict[str, str]:
        """Return the plugin's settings as variables of the environment."""
        return {f"OMNIDRAFT_VLLM_{name.upper()}": value for name, value in self.settings.items()}


def _make_ours(request: ArmRequest, name: str, *sources: str, learn: bool = False, flat: bool = False) -> VllmArm:
    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": request.drafts}
    settings = {"sources": json.dumps(sources)}
    if "model" in sources:
        settings["drafter"] = request.drafter
    if learn:
        settings |= {"run": str(request.folder / name), "learn": "true"}
    if flat:
        settings |= {"pass_costs": FLAT, "drafting_cost": CHEAP}
    return VllmArm(speculative, settings)


def _make_draft_model(request: ArmRequest) -> VllmArm:
    return VllmArm(
        {
            "method": "draft_model",
            "model": export_drafter(request.drafter, request.folder / "drafter"),
            "num_speculative_tokens": request.model_drafts,
            "use_heterogeneous_vocab": True,
        }
    )


def _make_ngram(request: ArmRequest) -> VllmArm:
    return VllmArm(
        {
            "method": "ngram",
            "num_speculative_tokens": request.drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    )


ARMS: Mapping[str, Callable[[ArmRequest], VllmArm]] = {
    PLAIN: lambda request: VllmArm(None),
    "ngram": _make_ngram,
    "suffix": lambda request: VllmArm({"method": "suffix"}),
    "draft-model": _make_draft_model,
    "memory": lambda request: _make_ours(request, "memory", "own", "memory"),
    "memory+model": lambda request: _make_ours(request, "model", "own", "memory", "model"),
    "learning": lambda request: _make_ours(request, "learning", "own", "memory", "model", learn=True),
    "memory-flat": lambda request: _make_ours(request, "memory", "own", "memory", flat=True),
    "memory+model-flat": lambda request: _make_ours(request, "model", "own", "memory", "model", flat=True),
}
OURS = ("memory", "memory+model", "learning", "memory-flat", "memory+model-flat")
DEFAULT = tuple(name for name in ARMS if not name.endswith("-flat"))


def export_drafter(drafter: str, folder: Path) -> str:
    """Return a drafter as vLLM can load it: its folder without the acceptance head, which vLLM takes for a shard.

    Args:
        drafter: a built-in model, a folder, or another name, which is returned as it is.
        folder: where links to the files are made.

    Raises:
        ModelError: there is no such built-in model.
    """
    builtin = drafter.removeprefix("builtin:")
    source = Path(drafter) if builtin == drafter else path_of(builtin)
    if not source.is_dir():
        return drafter
    folder.mkdir()
    for file in source.iterdir():
        if file.name != HEAD:
            (folder / file.name).symlink_to(file.resolve())
    return str(folder)
