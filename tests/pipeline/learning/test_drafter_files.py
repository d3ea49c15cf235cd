"""A version has the drafter as it was in service, whether its files were written or are those of an earlier version."""

import shutil
from pathlib import Path

import pytest

from pipeline.learning.publisher import DrafterFiles
from store.registry.version_folder import ManifestFields, open_version, seal

FIELDS = ManifestFields(
    name="d",
    version=0,
    parent=None,
    run="r",
    offset=0,
    target="t",
    drafter="d",
    pair="p",
    counters={},
    created_at="",
    drift=None,
    metrics={},
)


class Drafter:
    """Weights, an adapter, and a counter of updates."""

    def __init__(self) -> None:
        self.version = self.saved = 0

    def save(self, folder: Path) -> None:
        self.saved += 1
        (folder / "adapter").mkdir(parents=True)
        for name in ("model.safetensors", "adapter/weights.safetensors"):
            (folder / name).write_text(f"{name} {self.version}")


def make_version(files: DrafterFiles, folder: Path, head: str) -> dict[str, str]:
    """Write a version as a publisher does, and return its files as they are read again."""
    files.write(folder)
    (folder / "head.safetensors").write_text(head)
    seal(folder, FIELDS)
    return {name: (folder / name).read_text() for name in open_version(folder)["files"]}


def content(version: int, head: str) -> dict[str, str]:
    names = ("model.safetensors", "adapter/weights.safetensors")
    return {name: f"{name} {version}" for name in names} | {"head.safetensors": head}


def test_a_version_has_the_drafter_of_its_time_and_its_own_head(tmp_path: Path):
    drafter = Drafter()
    files = DrafterFiles(drafter.save, lambda: drafter.version)
    for number, updates in enumerate([0, 0, 0, 1, 1, 3]):
        drafter.version = updates
        assert make_version(files, tmp_path / f"{number}", f"head {number}") == content(updates, f"head {number}")
    assert drafter.saved == 3, "once per update that was in service"
    assert (tmp_path / "0" / "model.safetensors").samefile(tmp_path / "2" / "model.safetensors")
    assert open_version(tmp_path / "0")["files"].keys() == content(0, "").keys(), "no file of a later one"


@pytest.mark.parametrize("lost", ["the folder", "a file"])
def test_it_is_written_again_where_the_earlier_version_was_removed(tmp_path: Path, lost: str):
    drafter = Drafter()
    files = DrafterFiles(drafter.save, lambda: drafter.version)
    make_version(files, tmp_path / "0", "a")
    if lost == "the folder":
        shutil.rmtree(tmp_path / "0")
    else:
        (tmp_path / "0" / "adapter" / "weights.safetensors").unlink()
    assert make_version(files, tmp_path / "1", "b") == content(0, "b")
    assert drafter.saved == 2
