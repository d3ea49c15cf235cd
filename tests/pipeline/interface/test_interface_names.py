"""`import pipeline`: its public names, what they load, and how settings are given to them."""

from pathlib import Path

import pytest
from test_layout import modules_after

import pipeline
from pipeline.config.settings import Config
from pipeline.interface.arguments import build_config

HEAVY = {"torch", "transformers", "mlflow", "river", "duckdb", "pyarrow", "numpy"}


@pytest.mark.parametrize("name", pipeline.__all__)
def test_every_public_name_is_there_and_documented(name: str):
    assert len(getattr(pipeline, name).__doc__) > 40
    assert name in dir(pipeline)


def test_importing_loads_nothing_large():
    assert modules_after("import pipeline; pipeline.OmnidraftError, dir(pipeline)") & HEAVY == set()


def test_logs_and_versions_are_read_without_torch():
    loaded = modules_after("import pipeline; pipeline.open_log; pipeline.load_version; pipeline.Config")
    assert loaded & {"torch", "transformers", "mlflow", "river"} == set()


def test_settings_are_given_by_name_by_section_or_by_dotted_key():
    config = build_config(
        {"learn.rate": 0.002, "sampling": {"top_k": 20}}, {"batch": 4, "sampling": {"temperature": 1}}
    )
    assert (config.learn.rate, config.sampling.top_k, config.batch, config.sampling.temperature) == (0.002, 20, 4, 1.0)


def test_settings_of_a_file_and_of_a_config_are_overridden(tmp_path: Path):
    (tmp_path / "settings.toml").write_text("batch = 3\n[learn]\nrate = 0.002\n")
    from_file = build_config(tmp_path / "settings.toml", {"seed": 5})
    assert (from_file.batch, from_file.learn.rate, from_file.seed) == (3, 0.002, 5)
    assert build_config(Config(batch=2), {"seed": 5}) == Config(batch=2, seed=5)
    assert build_config(None, {}) == Config()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batches": 2}, "Unknown setting 'batches'. Did you mean 'batch'"),
        ({"learning": {"rate": 1.0}}, "Unknown setting 'learning.rate'. Did you mean 'learn.rate'"),
        ({"learn": 3}, "'learn' is a section"),
        ({"batch": "2"}, "'batch' must be a whole number"),
    ],
)
def test_settings_that_are_refused(overrides: dict[str, object], message: str):
    with pytest.raises(pipeline.ConfigError, match=message):
        build_config(None, overrides)
