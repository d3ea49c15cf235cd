"""`import pipeline`: its public names, what they load, and how settings are given to them."""

import importlib
import pkgutil
from pathlib import Path

import pytest
from test_layout import modules_after

import pipeline
from pipeline.config.settings import Config
from pipeline.interface.arguments import build_config, flatten_settings, model_settings

HEAVY = {"torch", "transformers", "mlflow", "river", "duckdb", "pyarrow", "numpy"}


@pytest.mark.parametrize("name", pipeline.__all__)
def test_every_public_name_is_there_and_documented(name: str):
    assert len(getattr(pipeline, name).__doc__) > 40
    assert name in dir(pipeline)


def test_no_public_name_is_hidden_by_a_module():
    """`import pipeline.serve` sets an attribute `serve`, so no function can have that name."""
    modules = {module.name for module in pkgutil.iter_modules(pipeline.__path__)}
    assert modules & set(pipeline.__all__) == set()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'replays'"):
        importlib.import_module("pipeline").replays  # noqa: B018


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


def test_a_file_of_settings_that_is_missing():
    with pytest.raises(pipeline.ConfigError, match="Cannot read the configuration file"):
        build_config("nowhere.toml", {})


def test_an_empty_section_is_not_dropped_without_a_word():
    assert flatten_settings({"nothing": {}}) == {"nothing": {}}


def test_models_are_named_by_texts_paths_and_lists():
    found = model_settings(["builtin:target-7m", Path("models/mine")], Path("models/small"))
    assert found == {"targets": ("builtin:target-7m", "models/mine"), "drafter": "models/small"}
    assert model_settings(None, None) == {}
