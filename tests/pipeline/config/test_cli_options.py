"""Options that override settings: what was given counts, and nothing else."""

from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from pipeline.config.cli_options import argument, flag, option, overrides_of, parse_settings, set_option

TAKEN: list[dict[str, Any]] = []


def command(
    sources: Annotated[list[str] | None, argument("sources", "Prompts.")] = None,
    target: Annotated[str | None, option("targets", "Target.")] = None,
    where: Annotated[list[str] | None, option("source.where")] = None,
    temperature: Annotated[float, option("sampling.temperature", "Temperature.")] = 0.5,
    seed: Annotated[int | None, option("seed", "Seed.", min=0)] = None,
    no_learn: Annotated[bool, flag("learn.enabled", False, "--no-learn", "Freeze.")] = False,
    chat: Annotated[bool | None, option("source.chat", "Chat.", "--chat/--no-chat")] = None,
    other: Annotated[str, typer.Option(help="No setting.")] = "none",
    settings: Annotated[list[str] | None, set_option("Any other.")] = None,
) -> None:
    TAKEN.append(overrides_of(command, locals()) | parse_settings(settings))


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ([], {"sampling.temperature": 0.5}),
        (["--temperature", "0", "--seed", "0"], {"sampling.temperature": 0.0, "seed": 0}),
        (["a", "b", "--other", "x"], {"sampling.temperature": 0.5, "sources": ("a", "b")}),
        (["--target", "t", "--where", "a=b"], {"targets": ("t",), "source.where": ("a=b",)}),
        (["--chat"], {"source.chat": True}),
        (["--no-chat"], {"source.chat": False}),
        (["--no-learn", "--set", "learn.rate=0.5"], {"learn.enabled": False, "learn.rate": 0.5}),
    ],
)
def test_options_override_their_settings(words: list[str], overrides: dict[str, Any]):
    app = typer.Typer()
    app.command()(command)
    TAKEN.clear()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert [{"sampling.temperature": 0.5} | overrides] == TAKEN


def test_a_setting_s_own_words_are_the_help():
    app = typer.Typer()
    app.command()(command)
    help_texts = [str(getattr(parameter, "help", "")) for parameter in typer.main.get_command(app).params]
    assert any("conditions on text, 'column=value'" in text for text in help_texts)
    assert "Freeze." in help_texts
