"""Defaults of a server, or of an engine in this process, that differ from those of a replay."""

from pipeline.config.settings import Config

BATCH = 8  # requests decoded together
TEMPERATURE = 1.0  # as OpenAI's interface and vLLM


def with_serving_defaults(config: Config) -> Config:
    """The settings with a server's defaults for `batch`, `sampling.temperature` and `draft.costs`, where they are not
    set. Requests arrive at other times in every run, so costs that follow the machine's load take no determinism away.
    """
    defaults = {"batch": BATCH, "sampling.temperature": TEMPERATURE, "draft.costs": "tracked"}
    given = {*config.model_fields_set, *(f"sampling.{name}" for name in config.sampling.model_fields_set)}
    given |= {f"draft.{name}" for name in config.draft.model_fields_set}
    return config.with_overrides({name: value for name, value in defaults.items() if name not in given})
