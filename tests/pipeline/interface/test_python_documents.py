"""`docs/python.md` and the example in `examples/` run as they are written, over a tiny pair of models."""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "first-run.ipynb"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builtin_pair: None) -> None:
    monkeypatch.chdir(tmp_path)


def run_in_order(blocks: list[str]) -> dict[str, Any]:
    """Execute blocks of code in one namespace, as a reader would type them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec"), names)
    return names


@pytest.mark.slow
def test_the_document_runs(capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    names = run_in_order(blocks)
    assert names["result"].summary.totals.prompts == 8
    assert names["completion"].usage.emitted > 0
    assert "Did you mean 'learn.rate'?" in capsys.readouterr().out


@pytest.fixture
def example() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXAMPLE.read_text())
    return found


@pytest.mark.slow
def test_the_example_runs(example: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    mpl.use("agg")
    cells = ["".join(cell["source"]) for cell in example["cells"] if cell["cell_type"] == "code"]
    assert "PROMPTS = 60" in cells[0]
    names = run_in_order([cells[0].replace("PROMPTS = 60", "PROMPTS = 8"), *cells[1:]])
    assert len(names["prompts"]) == 8
    assert len(names["completions"]) == 2
    assert "tokens per pass" in capsys.readouterr().out
    names["plt"].close("all")
