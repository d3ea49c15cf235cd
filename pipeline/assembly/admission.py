"""Admission: a prompt's text becomes a row, in the ids of the target and in the pieces of the drafter."""

from collections.abc import Callable

from pipeline.assembly.models import Models
from pipeline.config.sections import SourceSettings
from pipeline.config.settings import Config
from pipeline.loop import UnfitPromptError
from stages.contract.blocks import SequenceState
from stages.sampling.random_source import SeededRandomSource
from stages.vocabulary.chat import ChatEncoder
from store.errors import ConfigError
from store.events import PromptReceived

Encode = Callable[[str], tuple[list[int], list[int]]]  # a text to the target's ids and the drafter's pieces


def make_admission(config: Config, models: Models) -> Callable[[PromptReceived], SequenceState]:
    """Makes sequences of prompts; refuses those that are too long for a model's context.

    Raises:
        ConfigError: prompts are to be chat prompts, but there is no template that can be used.
    """
    encode = prompt_encoder(config.source, models)
    budget = config.sampling.max_new_tokens
    limits = {"target": models.target.max_length - budget - 1, "drafter": models.drafter.max_length - 1}

    def prepare(prompt: PromptReceived) -> SequenceState:
        try:
            tokens, pieces = encode(prompt.text)
        except ConfigError as error:
            raise UnfitPromptError(str(error)) from error
        for model, length in (("target", len(tokens)), ("drafter", len(pieces))):
            if not 0 < length <= limits[model]:
                allowed = f"1 to {limits[model]} of the {model}'s tokens"
                raise UnfitPromptError(f"the prompt {prompt.prompt_id} must have {allowed}, got {length}")
        draws = SeededRandomSource(config.seed, prompt.offset)
        text = prompt.text if config.log.text else ""  # a row is kept in checkpoints too
        return SequenceState(
            prompt.offset, prompt.prompt_id, prompt.dataset, text, tokens, len(tokens), pieces, draws, budget
        )

    return prepare


def prompt_encoder(settings: SourceSettings, models: Models) -> Encode:
    """Encodes a prompt's text as configured: alone, or as a message in the target's chat template. The encoder raises
    ConfigError for a text of which the template makes no prompt.

    Raises:
        ConfigError: prompts are to be chat prompts, but there is no template that can be used.
    """
    return _chat(settings, models) if settings.chat else _plain(models)


def _plain(models: Models) -> Encode:
    return lambda text: (models.target_vocabulary.encode(text), models.drafter_vocabulary.encode(text))


def _chat(settings: SourceSettings, models: Models) -> Encode:
    return ChatEncoder(models.target_vocabulary, models.drafter_vocabulary, models.pair, chat_template(settings)).encode


def chat_template(settings: SourceSettings) -> str | None:
    """The template that the settings name; None for the target's own.

    Raises:
        ConfigError: it cannot be read.
    """
    if settings.chat_template is None:
        return None
    try:
        return settings.chat_template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"source.chat_template must be a readable Jinja file: {error}") from error
