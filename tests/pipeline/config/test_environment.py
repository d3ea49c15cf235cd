"""Environment variables for every setting, the sample file, and the settings in force with their origins."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.studies.messages import collect_messages
from pipeline.cli.app import app
from pipeline.cli.config import format_sample
from pipeline.config.cli_options import parse_settings
from pipeline.config.environment import read_environment, variable_of
from pipeline.config.settings import Config, load, settings
from store.errors import ConfigError, UsageError


def test_every_setting_has_a_variable_of_its_own():
    assert len({variable_of(key) for key in settings()}) == len(settings())
    assert variable_of("sampling.top_p") == "OMNIDRAFT_SAMPLING_TOP_P"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("batch", "8", 8),
        ("sampling.temperature", "0.7", 0.7),
        ("learn.enabled", "false", False),
        ("draft.mode", "tli", "tli"),
        ("source.chat", "true", True),
        ("source.chat", "auto", "auto"),
        ("drafter", "123", "123"),
        ("run", "2026", Path("2026")),
        ("targets", "a, b", ("a", "b")),
        ("targets", '["a,b"]', ("a,b",)),
        ("source.limit", "3", 3),
        ("source.template", "{prompt} = 1", "{prompt} = 1"),
    ],
)
def test_a_variable_gives_its_setting(key: str, text: str, value: object):
    config = Config().with_overrides(read_environment({variable_of(key): text}))
    section, _, name = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, name) == value


def test_what_is_no_value_of_a_setting_is_refused():
    with pytest.raises(ConfigError, match=r"'batch' must be a whole number, got 'many'"):
        Config().with_overrides(read_environment({"OMNIDRAFT_BATCH": "many"}))


def test_mistyped_variables_are_reported_and_others_are_not():
    variables = {"OMNIDRAFT_SEDE": "1", "OMNIDRAFT_API_KEY": "x", "OMNIDRAFT_ELSEWHERE": "y", "HOME": "/", "SEED": "3"}
    with collect_messages() as lines:
        assert read_environment(variables) == {}
    assert lines == ["the variable OMNIDRAFT_SEDE is no setting; did you mean OMNIDRAFT_SEED?"]


def test_the_sample_has_every_setting_and_reads_as_the_defaults(tmp_path: Path):
    sample = format_sample()
    commented = re.sub(r"^#(\w+ =)", r"\1", sample, flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(re.sub(r"^\w+ =$", "", commented, flags=re.MULTILINE))
    (tmp_path / "sample.toml").write_text(sample)
    assert load(tmp_path / "all.toml") == load(tmp_path / "sample.toml") == Config()
    for key, field in settings().items():
        assert f"# Environment: {variable_of(key)}\n#{key.rpartition('.')[2]} =" in sample
        assert str(field.description).split()[0] in sample
    assert len(tomllib.loads((tmp_path / "all.toml").read_text())) > 10


def test_the_sample_goes_to_a_new_file_only(tmp_path: Path):
    file = tmp_path / "settings.toml"
    assert CliRunner().invoke(app, ["config", "--sample", str(file)]).exit_code == 0
    assert file.read_text() == format_sample() == CliRunner().invoke(app, ["config", "--sample", "-"]).stdout
    again = CliRunner().invoke(app, ["config", "--sample", str(file)])
    assert isinstance(again.exception, UsageError)
    assert "new file" in str(again.exception)


def show(*arguments: object, **environment: str) -> Any:
    done = CliRunner().invoke(app, ["config", *map(str, arguments)], env=environment)
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_settings_are_shown_with_their_origins(tmp_path: Path):
    file = tmp_path / "settings.toml"
    file.write_text("batch = 2\nseed = 5\n[learn]\nrate = 0.5\ninterval = 8\n")
    typed = ["--config", file, "--set", "learn.rate=0.25"]
    found = json.loads(show(*typed, "--json", OMNIDRAFT_BATCH="4"))
    assert (found["settings"]["batch"], found["settings"]["seed"]) == (4, 5)
    assert found["settings"]["learn"]["rate"] == 0.25
    origins = {"batch": "OMNIDRAFT_BATCH", "seed": str(file), "learn.rate": "--set", "learn.interval": str(file)}
    assert found["origins"] == origins
    changed = show(*typed, "--changed", OMNIDRAFT_BATCH="4")
    assert changed == (
        f"seed = 5  # {file}\nbatch = 4  # OMNIDRAFT_BATCH\n\n[learn]\ninterval = 8  # {file}\nrate = 0.25  # --set\n"
    )


def test_what_is_shown_reads_back_equal(tmp_path: Path):
    (tmp_path / "shown.toml").write_text(show("--set", "batch=3", "--set", "source.where=['a=b']"))
    assert load(tmp_path / "shown.toml") == Config().with_overrides({"batch": 3, "source.where": ["a=b"]})


def test_what_the_default_run_has_instead_is_shown():
    shown = show("--set", "source.limit=3").splitlines()
    assert shown[0].startswith("# A replay without a source and a target runs SmolLM2-135M-Instruct")
    assert '#   sources = ["builtin:questions", "builtin:rust"]' in shown
    assert "#   sampling.max_new_tokens = 48" in shown
    assert not any(line.startswith("#   source.limit") for line in shown), "it was given"
    assert not show("--set", "targets=['builtin:target-7m']").startswith("#")


def test_typed_settings_are_read_as_variables_are():
    typed = parse_settings(["draft.sources=own,memory", "run=2024", "draft.costs=0.3", "source.where=a=b", "nope=1"])
    wanted = {"draft.sources": ("own", "memory"), "run": "2024", "draft.costs": 0.3, "source.where": ("a=b",)}
    assert typed == wanted | {"nope": "1"}
