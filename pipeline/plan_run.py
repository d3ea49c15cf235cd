"""The figures of a plan that a real run tells: bytes of its log and versions, and how fast it decoded."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.plan_figures import BYTES, Figures
from store.errors import RunError
from store.manifest import MANIFEST, Manifest
from store.partitions import read_manifests
from store.queries import LogReader

WEIGHTS = "model.safetensors"  # of the drafter, in a version's folder
_DECODING = """
SELECT count(*) AS prompts, (SELECT sum(seconds_decode + seconds_translate + seconds_verify) FROM blocks) AS seconds
FROM prompts
"""


def figures_of_run(run_folder: Path, known: Figures) -> dict[str, float]:
    """What takes the place of the figures of the same names.

    How long learning takes is not among them: the clock of a run says how long its learner slept, too.

    Args:
        run_folder: with prompts in its log.
        known: the other figures.

    Raises:
        RunError: it holds no log, or nothing that was completed.
    """
    with LogReader([run_folder]) as log:
        (decoded,) = log.select(_DECODING).to_pylist()
    if not decoded["prompts"] or not decoded["seconds"]:
        raise RunError(f"{run_folder} must hold completed prompts to plan by, but has none; see --run")
    found = {"worker_prompts": decoded["prompts"] / decoded["seconds"]}
    return found | _of_log(read_manifests(run_folder), decoded["prompts"], known) | _of_versions(run_folder)


def _of_log(manifests: Mapping[Path, Manifest], prompts: int, known: Figures) -> dict[str, float]:
    """Each part is taken to have as many bytes for itself as is known."""
    sizes = [part.bytes for one in manifests.values() for parts in one.tables.values() for part in parts]
    lengths = sum((folder / MANIFEST).stat().st_size for folder in manifests)
    for_itself = min(known.part_bytes, min(sizes))
    return {
        "log_bytes": (sum(sizes) - for_itself * len(sizes)) / prompts,
        "part_bytes": for_itself,
        "manifest_bytes": lengths / len(sizes),
    }


def _of_versions(run_folder: Path) -> dict[str, float]:
    """By the newest version; nothing where there is none."""
    weights = max(run_folder.glob(f"versions/[0-9]*/{WEIGHTS}"), default=None)
    if weights is None:
        return {}
    of_weights, files = weights.stat().st_size, [path for path in weights.parent.rglob("*") if path.is_file()]
    return {
        "drafter_parameters": of_weights / BYTES,
        "version_bytes": float(sum(path.stat().st_size for path in files) - of_weights),
    }
