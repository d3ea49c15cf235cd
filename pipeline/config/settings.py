"""Every setting of a run: frozen, complete, checked. An unknown key raises an error that suggests the nearest one.

A setting is identified by its dotted key, such as `sampling.top_p`. `settings()` lists all of them with their
descriptions, which are also the help texts of the command line.

>>> Config().with_overrides({"sampling.temperature": 1.0}).sampling.temperature
1.0
>>> Config().with_overrides({"sampling.temprature": 1.0})
Traceback (most recent call last):
store.errors.ConfigError: Unknown setting 'sampling.temprature'. Did you mean 'sampling.temperature'?
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipeline.config.sections import (
    CacheSettings,
    CommitSettings,
    DraftSettings,
    DriftSettings,
    LearnSettings,
    LogSettings,
    MemorySettings,
    PromptSettings,
    PublishSettings,
    SamplingSettings,
    Section,
    ServeSettings,
    SourceSettings,
    Texts,
    VocabularySettings,
    WeightFormat,
)
from store.errors import ConfigError
from store.registry.registered_version import BETWEEN, name_of_pair, part_of_name


@dataclass(frozen=True)
class TargetRouter:
    """Routes prompts to the targets in turn by offset; from the offset of a swap on, all prompts go to its target.

    >>> route = TargetRouter(("a", "b"), ((4, "c"),))
    >>> [route(offset) for offset in range(6)]
    ['a', 'b', 'a', 'b', 'c', 'c']
    """

    first: tuple[str, ...]  # the targets at the start
    swaps: tuple[tuple[int, str], ...] = ()  # offset and target, in order of offset

    @classmethod
    def parse(cls, targets: tuple[str, ...], swaps: tuple[str, ...]) -> "TargetRouter":
        """Make the router of the settings `targets` and `swaps`. Raises `ConfigError` if a target has no name or is
        named twice, or a swap is not 'OFFSET=TARGET' with rising offsets.
        """
        if not all(targets):
            raise ConfigError("every target must have a name, got an empty text; see --target")
        if len(set(targets)) < len(targets):
            raise ConfigError(f"every target may be named once, got {', '.join(targets)}")
        parsed = tuple(_parse_swap(swap) for swap in swaps)
        if sorted({offset for offset, _ in parsed}) != [offset for offset, _ in parsed]:
            raise ConfigError(f"swaps must come in order of their offsets, got {', '.join(swaps)}")
        return cls(targets, parsed)

    @property
    def targets(self) -> tuple[str, ...]:
        """All targets of the run, each once."""
        return tuple(dict.fromkeys([*self.first, *(target for _, target in self.swaps)]))

    def __call__(self, offset: int) -> str:
        """The target of the prompt at this offset."""
        for begin, target in reversed(self.swaps):
            if offset >= begin:
                return target
        return self.first[offset % len(self.first)]


def _parse_swap(swap: str) -> tuple[int, str]:
    offset, equals, target = swap.partition("=")
    if not equals or not target or not offset.isdigit() or int(offset) < 1:
        raise ConfigError(
            f"a swap must be OFFSET=TARGET with an offset from 1 on, such as 300=builtin:target-7m, got {swap!r}"
        )
    return int(offset), target


class Config(Section):
    """All settings of one run. Build it with `load`, `from_mapping` or `with_overrides`, which raise ConfigError."""

    sources: Texts = Field(
        default=("builtin:docs", "builtin:code"),
        min_length=1,
        description="Prompt sources, replayed one after another.",
    )
    targets: Texts = Field(
        default=("builtin:target-12m",),
        min_length=1,
        description="Target models: hub name, folder or builtin. A prompt names its target, or targets are used "
        "in turn.",
    )
    swaps: Texts = Field(
        default=(),
        description="Target changes during the stream: 'OFFSET=TARGET' switches to TARGET from that prompt on.",
    )
    drafter: str = Field(
        default="builtin:drafter-1.6m",
        min_length=1,
        description="Drafter: hub name, folder, builtin or models:/NAME/VERSION. Without one, targets that are not "
        "built in have builtin:drafter-4m.",
    )
    run: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="Folder of the run, or s3://BUCKET/PATH; default: a new folder under runs/."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Random seed of the run.")
    device: str = Field(
        default="auto", min_length=1, description="Torch device such as cpu or cuda:1; auto chooses the best."
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        default="float32", description="Data type of the model weights."
    )
    batch: int = Field(default=1, ge=1, description="Number of prompts decoded concurrently.")
    weights: WeightFormat = Field(
        default="auto",
        description="Weight format of the targets: the fastest layout in the type `dtype` ('fastest'); 'codes', the "
        "own bits of a GGUF file, whose inputs are rounded to 16 bits; 'codes8', the same with inputs of 8 bits, as "
        "other engines compute with them, faster and less precise; 'int8' and 'int4' quantise the target and change "
        "its outputs. 'auto': 'codes' for a quantised GGUF file, else 'fastest'.",
    )
    batch_invariant: bool = Field(
        default=False,
        description="Whether a token must have the same logits bit for bit whatever else a pass computes. With the "
        "compiled forward pass it has, which is then used for large models in float32 too; others are refused.",
    )
    threads: int | None = Field(
        default=None, ge=1, description="Number of CPU threads. Default: 1 for small targets, else torch's choice."
    )
    source: SourceSettings = SourceSettings()
    sampling: SamplingSettings = SamplingSettings()
    draft: DraftSettings = DraftSettings()
    memory: MemorySettings = MemorySettings()
    prompts: PromptSettings = PromptSettings()
    vocabulary: VocabularySettings = VocabularySettings()
    cache: CacheSettings = CacheSettings()
    learn: LearnSettings = LearnSettings()
    drift: DriftSettings = DriftSettings()
    publish: PublishSettings = PublishSettings()
    log: LogSettings = LogSettings()
    commit: CommitSettings = CommitSettings()
    serve: ServeSettings = ServeSettings()

    @model_validator(mode="after")
    def _choose_drafter(self) -> Self:
        """Without a named drafter, use that of the built-in targets, or that of chat models."""
        if "drafter" not in self.model_fields_set:
            is_builtin = any(name.startswith("builtin:") for name in self.targets)
            self.__dict__["drafter"] = "builtin:drafter-1.6m" if is_builtin else "builtin:drafter-4m"
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        """Refuse a loss that would change nothing."""
        if self.learn.trains_output_layer and self.learn.loss != "trie":
            raise ConfigError(
                f"learn.loss = '{self.learn.loss}' needs learn.method = 'gradient': in closed form there is one loss"
            )
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """The configuration with nested `values` over the defaults. Raises `ConfigError`, which lists all mistakes, one
        sentence each: unknown keys, wrong types, values outside their range.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_describe_mistakes(error.errors())) from None

    def with_overrides(self, overrides: Mapping[str, object]) -> Self:
        """A copy in which settings named by dotted keys have the given values, None included. Raises `ConfigError`."""
        values = self.model_dump()
        if "drafter" not in self.model_fields_set:
            del values["drafter"]  # nobody named it, and other targets may have another one
        for key, value in overrides.items():
            if key not in settings():
                raise ConfigError(_unknown(key))
            *section, name = key.split(".")
            (values[section[0]] if section else values)[name] = value
        return self.from_mapping(values)

    @property
    def router(self) -> TargetRouter:
        """The targets and their swaps, parsed. Raises `ConfigError`."""
        return TargetRouter.parse(self.targets, self.swaps)

    @property
    def drift_in_effect(self) -> DriftSettings:
        """`drift` with a response that can be given: nothing adapts without learning or comes back without versions."""
        response = self.drift.response
        if not self.learn.enabled:
            response = "none"
        elif response == "recall" and not self.publish.enabled:
            response = "reset"
        return self.drift.model_copy(update={"response": response})

    def name_registered_model(self, target: str) -> str:
        """Return the name of the registered model for versions of one target: `publish.name`, which the target's name
        follows where a run has several targets, or else one for each pair of target and drafter.
        """
        if not self.publish.name:
            return name_of_pair(target, self.drafter)
        several = len(self.targets) + len(self.swaps) > 1
        return f"{self.publish.name}{BETWEEN}{part_of_name(target)}" if several else self.publish.name

    def flatten(self) -> dict[str, object]:
        """Every setting as a JSON value, by dotted key."""
        values, flat = self.model_dump(mode="json"), dict[str, object]()
        for key in settings():
            section, _, name = key.rpartition(".")
            flat[key] = (values[section] if section else values)[name]
        return flat

    def list_given(self) -> list[str]:
        """List the settings that were given when the configuration was made, by dotted key."""

        def is_given(key: str) -> bool:
            section, _, name = key.rpartition(".")
            return name in (getattr(self, section) if section else self).model_fields_set

        return [key for key in settings() if is_given(key)]

    def to_json(self) -> str:
        """Every setting as JSON, defaults included; `load` reads it back to an equal value."""
        return self.model_dump_json(indent=2) + "\n"


def load(path: Path) -> Config:
    """Read a configuration from a `.json` file (a run's `config.json`) or, by any other name, TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file '{path}': {error.strerror}.") from None
    except ValueError as error:  # JSON's, TOML's and UTF-8's errors are all of this kind
        raise ConfigError(f"The configuration file '{path}' cannot be parsed: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"The configuration file '{path}' must hold an object of settings, got {values!r}.")
    try:
        return Config.from_mapping(values)
    except ConfigError as error:
        raise ConfigError(f"In '{path}': {error}") from None


def settings() -> dict[str, FieldInfo]:
    """Every setting by its dotted key, in order, with its `default` and `description`."""
    return dict(_settings_of(Config, ""))


def _settings_of(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings_of(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _describe_mistakes(details: Sequence[ErrorDetails]) -> str:
    """One sentence for each key that pydantic refuses: what must hold, and what was got."""
    rules: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        section, *rest = map(str, detail["loc"])
        key = ".".join((section, *rest))
        if ".".join((section, *rest[:1])) in settings() and isinstance(detail["loc"][-1], str):
            key = ".".join((section, *rest[:1]))  # without the alternative of a setting with several types
        rules.setdefault(key, []).append(detail)
    return " ".join(_sentence(key, found) for key, found in rules.items())


def _sentence(key: str, details: Sequence[ErrorDetails]) -> str:
    kind, given = details[0]["type"], details[0]["input"]
    if kind == "extra_forbidden":
        return _unknown(key)
    if kind in ("model_type", "model_attributes_type"):
        return f"'{key}' must be a section of settings, got {given!r}."
    rules = [_state_rule(detail["msg"]) for detail in details]
    alternatives = [rules[0], *(rule.removeprefix("must be ") for rule in rules[1:])]
    return f"Setting '{key}' {' or '.join(alternatives)}, got {given!r}."


def _state_rule(message: str) -> str:
    rule = message.removeprefix("Input ").replace("should be a valid", "should be a")
    for pydantic_words, words in _PLAINER.items():
        rule = rule.replace(pydantic_words, words)
    return rule


_PLAINER = {
    "should": "must",
    "a integer": "a whole number",
    "a boolean": "true or false",
    "a string": "text",
    "a tuple": "a list",
    "is not a valid path for <class 'pathlib.Path'>": "must be a path",
    "True, False": "true, false",
    "String ": "",
    "Tuple ": "",
    "item after validation, not 0": "entry",
}


def _unknown(key: str) -> str:
    """The sentence for a key that is no setting, with the one that was probably meant."""
    known = list(settings())
    inside = [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"'{key}' is a section, not a setting. Name one of its settings: {', '.join(inside)}."
    known += [name for name in Config.model_fields if name not in known]  # the sections
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    for group, cutoff in ((namesakes, 0.0), (siblings, 0.6), (known, 0.5)):
        for nearest in get_close_matches(key, group, n=1, cutoff=cutoff):
            return f"Unknown setting '{key}'. Did you mean '{nearest}'?"
    return f"Unknown setting '{key}'. There are: {', '.join(siblings or known)}."
