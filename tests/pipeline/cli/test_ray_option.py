"""`--ray` with and without its address."""

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli import run
from pipeline.cli.run import RayAlone, Workers


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
    begun: list[Workers] = []
    monkeypatch.setattr(run, "_begin", lambda config, runs, workers, show: begun.append(workers))
    app = typer.Typer()
    app.command(cls=RayAlone)(run.replay)
    assert CliRunner().invoke(app, words).exit_code == 0
    workers = 2 if "--workers" in words else 1
    assert begun == [{"address": address, "workers": workers} if address else {}]
