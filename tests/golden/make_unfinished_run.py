"""Make `unfinished-run/`: a replay that is killed after a commit in its middle. Run it in the project's folder as

    python tests/golden/make_unfinished_run.py

and only when unfinished runs of earlier releases can no longer be resumed: the stored run is useful because an
earlier state of the code wrote it. Afterwards rewrite the golden data (see conftest.py).

All names in the run are relative to its folder, so a copy works anywhere.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from faulty_runs import NOBODY, PROGRAM, SETTINGS, spoil
from product import VARIABLE, read_manifest
from tiny_pair import sentences, shape, tiny_model, write_prompts

from pipeline.model_building import recipes

FOLDER = Path(__file__).parent / "unfinished-run"
RUN = "run"
PROMPTS = 9  # in each of two sources
KILLED_AT = "commit: after the manifest=5"
# Settings whose effect depends on the machine's speed are fixed, so that a resumed run decides like an uninterrupted
# one on any machine.
FIXED = {"draft.pause": "false", "threads": 1}
SMALL = {"publish.interval": 9}


def build_models(folder: Path) -> None:
    """Build a target and a drafter that are as small as possible."""
    with patch.object(recipes, "documents", lambda recipe, data: sentences(0, 250)):
        for name, width in (("target", 24), ("drafter", 16)):
            recipe = tiny_model(name)
            small = replace(recipe, model=replace(recipe.model, shape=shape(1, width)))
            recipes.build(small, Path(), folder, lambda step, loss: None)


def command() -> list[str]:
    """The command that starts the run."""
    words = ["replay", "sums.jsonl", "strange.jsonl", "--target", "models/target", "--drafter", "models/drafter"]
    words += ["--temperature", "1", "--max-new-tokens", "16", "--batch", "3", "--device", "cpu", "--mlflow-uri", NOBODY]
    words += [word for key, value in (SETTINGS | FIXED | SMALL).items() for word in ("--set", f"{key}={value}")]
    return [*words, "--run", RUN]


def make() -> None:
    """Replace the folder by a new unfinished run."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    build_models(FOLDER / "models")
    write_prompts(FOLDER / "sums.jsonl", sentences(600, 600 + PROMPTS))
    turned = [text[:30].swapcase()[::-1] for text in sentences(700, 700 + PROMPTS)]
    write_prompts(FOLDER / "strange.jsonl", turned)
    for name in ("sums.jsonl", "strange.jsonl"):
        spoil(FOLDER / name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: KILLED_AT}
    subprocess.run([sys.executable, "-c", PROGRAM, *command()], cwd=FOLDER, env=environment, check=False)
    committed = read_manifest(FOLDER / RUN).checkpoint
    assert committed
    for checkpoint in (FOLDER / RUN / "checkpoint").iterdir():
        if checkpoint != FOLDER / RUN / committed.folder:  # a resume would remove it
            shutil.rmtree(checkpoint)
    for path in FOLDER.rglob(".*"):  # lock files
        if path.is_file():
            path.unlink()


if __name__ == "__main__":
    make()
