"""`omnidraft pad` from the command line."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli.models import pad
from pipeline.models import catalog as zoo
from stages.engine.models.huggingface import load_causal_model
from store.errors import ModelError, UsageError

app = typer.Typer()
app.command()(pad)
SMALL = zoo.MODELS_FOLDER / "target-7m"


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
@pytest.mark.skipif(not SMALL.is_dir(), reason="the built-in models are not built")
@pytest.mark.parametrize(("source", "size"), [("builtin:target-7m", "60M"), (SMALL, "0.06B")])
def test_pad_writes_a_folder_and_reports_its_size(source: object, size: str, tmp_path: Path):
    done = call(source, tmp_path / "large", "--parameters", size, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    model = load_causal_model(str(tmp_path / "large"), "auto", "cpu")
    assert f"{sum(weight.numel() for weight in model.parameters()):,} parameters (12 layers x 768" in done.output
    assert "largest difference of logits" in done.output


@pytest.mark.parametrize("size", ["large", "", "infM", "nanM", "-60M", "-5", "0M", "B"])
def test_an_invalid_size_is_refused(size: str, tmp_path: Path):
    done = call("nowhere", tmp_path, f"--parameters={size}")
    assert isinstance(done.exception, UsageError)
    assert "--parameters must be a positive number such as 100M" in str(done.exception)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path):
    (tmp_path / "kept").write_text("here", encoding="utf-8")
    for place in (tmp_path, tmp_path / "kept"):
        done = call("nowhere", place)
        assert isinstance(done.exception, UsageError)
        assert "must go to a new or empty folder" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_an_unknown_built_in_model_is_refused(tmp_path: Path):
    done = call("builtin:target", tmp_path, "--parameters", 60_000_000)
    assert isinstance(done.exception, ModelError)
    assert not list(tmp_path.iterdir())
