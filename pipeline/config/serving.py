"""Defaults of a server, or of an engine in this process, that differ from those of a replay."""

from pipeline.config.settings import Config

BATCH = 8  # requests decoded together
TEMPERATURE = 1.0  # as OpenAI's interface and vLLM


def with_serving_defaults(config: Config) -> Config:
    """The settings with a server's defaults for `batch` and `sampling.temperature`, where they are not set."""
    defaults = {"batch": BATCH, "sampling.temperature": TEMPERATURE}
    given = {*config.model_fields_set, *(f"sampling.{name}" for name in config.sampling.model_fields_set)}
    return config.with_overrides({name: value for name, value in defaults.items() if name not in given})
