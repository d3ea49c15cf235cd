"""Settings of the plugin: from a TOML file that OMNIDRAFT_VLLM_CONFIG names, and from environment variables.

vLLM passes no options to a proposer class. A setting is read from OMNIDRAFT_VLLM_ and its name in capitals, written as
those of `omnidraft` (pipeline/config/environment.py); variables take precedence over the file.

>>> read_settings({"OMNIDRAFT_VLLM_ORDER": "4", "OMNIDRAFT_VLLM_SOURCES": '["memory"]'}).order
4
>>> read_settings({"OMNIDRAFT_VLLM_RUN": "runs/chat"}).run.as_posix()
'runs/chat'
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.config.environment import parse_value
from pipeline.config.sections import Section
from store.errors import ConfigError

PREFIX = "OMNIDRAFT_VLLM_"
CONFIG = PREFIX + "CONFIG"
Sources = Annotated[tuple[Literal["own", "memory", "model"], ...], Field(strict=False)]
CostPoint = Annotated[tuple[int, float], Field(strict=False)]
CostPoints = Annotated[tuple[CostPoint, ...], Field(strict=False, min_length=1)]


class PluginSettings(Section):
    """All settings of the plugin."""

    sources: Sources = Field(
        default=("own", "memory"),
        description="Sources of drafts: the request's own text ('own'), what the target emitted before ('memory') and "
        "a drafter model ('model').",
    )
    memory_bytes: int = Field(default=67_108_864, ge=512, description="Memory budget of completed texts in bytes.")
    order: int = Field(default=8, ge=1, le=8, description="Maximum number of tokens of a remembered context.")
    pass_costs: CostPoints | None = Field(
        default=None,
        description="Costs of the model's passes in any unit, as [tokens read, cost], tokens ascending. "
        "Default: measured while the engine runs.",
    )
    drafting_cost: float | None = Field(
        default=None,
        gt=0,
        description="Cost of a pass of the drafter model, in the unit of `pass_costs`, which it needs. "
        "Default: 0.05 of the first of them.",
    )
    run: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="Folder of a run, which keeps the log and the memory. Default: nothing is kept."
    )
    log_text: bool = Field(
        default=False, description="Whether the log contains prompts, texts and token bytes; ids are always logged."
    )
    commit_seconds: float = Field(
        default=10.0, gt=0, description="Seconds after which the log and the memory are saved."
    )
    drafter: str = Field(
        default="builtin:drafter-4m",
        min_length=1,
        description="Drafter of the source 'model': hub name, folder, builtin or models:/NAME/VERSION.",
    )
    learn: bool = Field(
        default=False, description="Whether the drafter is trained on the target's distributions; needs `run`."
    )
    mlflow_uri: str | None = Field(
        default=None, description="MLflow store of the versions. Default: a local one next to the run."
    )

    set: dict[str, Any] = Field(
        default={}, description="Further settings of omnidraft for the drafter and its learner, by dotted key."
    )

    @model_validator(mode="after")
    def _check_dependencies(self) -> Self:
        if self.drafting_cost and not self.pass_costs:
            raise ValueError("drafting_cost needs pass_costs, whose unit it has")
        if self.learn and (self.run is None or "model" not in self.sources):
            raise ValueError("learn needs a run, and 'model' among the sources")
        return self


def read_settings(environment: Mapping[str, str] = os.environ) -> PluginSettings:
    """Return the settings of the environment."""
    file = environment.get(CONFIG)
    values = _read_file(Path(file)) if file else {}
    for name, text in environment.items():
        if name.startswith(PREFIX) and name != CONFIG and text:
            setting = name.removeprefix(PREFIX).lower()
            field = PluginSettings.model_fields.get(setting)
            values[setting] = parse_value(text, field) if field else text
    try:
        return PluginSettings.model_validate(values)
    except ValidationError as error:
        mistakes = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        known = ", ".join(PluginSettings.model_fields)
        raise ConfigError(f"Settings of the vLLM plugin are refused: {mistakes}. There are: {known}.") from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{CONFIG} must name a file that can be read, but '{path}': {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"The file '{path}' of {CONFIG} must be TOML, but: {error}.") from None
