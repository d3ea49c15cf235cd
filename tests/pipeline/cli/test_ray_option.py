"""`--ray` with and without its address."""

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli import run
from pipeline.cli.run import RayAlone, Several


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray"], "local"),
        (["--ray", "--workers", "2"], "local"),
        (["--ray", "auto"], "auto"),
        (["--ray=head:6379", "prompts.jsonl"], "head:6379"),
        (["prompts.jsonl"], None),
    ],
)
def test_ray_alone_is_a_cluster_of_its_own(words: list[str], address: str | None, monkeypatch: pytest.MonkeyPatch):
    begun: list[Several | None] = []
    monkeypatch.setattr(run, "_begin", lambda config, runs, several, show: begun.append(several))
    app = typer.Typer()
    app.command(cls=RayAlone)(run.replay)
    assert CliRunner().invoke(app, words).exit_code == 0
    workers = 2 if "--workers" in words else 1
    assert begun == [Several(address, workers) if address else None]
