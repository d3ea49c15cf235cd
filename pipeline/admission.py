"""Admission: a prompt's text becomes a row, in the ids of the target and in the pieces of the drafter."""

from collections.abc import Callable

from pipeline.build_models import Models
from pipeline.config import Config
from pipeline.loop import UnfitPromptError
from stages.blocks import Row
from stages.chat import ChatEncoder
from stages.draws import SeededDraws
from store.errors import ConfigError
from store.events import PromptReceived

Encode = Callable[[str], tuple[list[int], list[int]]]  # a text to the target's ids and the drafter's pieces


def make_admission(config: Config, models: Models) -> Callable[[PromptReceived], Row]:
    """Makes rows of prompts; refuses those that leave no room in a model's context.

    Raises:
        ConfigError: prompts are to be chat prompts, but there is no template that can be used.
    """
    encode = _chat(config, models) if config.source.chat else _plain(models)
    room = config.sampling.max_new_tokens
    limits = {"target": models.target.max_length - room - 1, "drafter": models.drafter.max_length - 1}

    def prepare(prompt: PromptReceived) -> Row:
        try:
            tokens, pieces = encode(prompt.text)
        except ConfigError as error:
            raise UnfitPromptError(str(error)) from error
        for model, length in (("target", len(tokens)), ("drafter", len(pieces))):
            if not 0 < length <= limits[model]:
                allowed = f"1 to {limits[model]} of the {model}'s tokens"
                raise UnfitPromptError(f"the prompt {prompt.prompt_id} must have {allowed}, got {length}")
        draws = SeededDraws(config.seed, prompt.offset)
        text = prompt.text if config.log.text else ""  # a row is kept in checkpoints too
        return Row(prompt.offset, prompt.prompt_id, prompt.dataset, text, tokens, len(tokens), pieces, draws, room)

    return prepare


def _plain(models: Models) -> Encode:
    return lambda text: (models.target_words.encode(text), models.drafter_words.encode(text))


def _chat(config: Config, models: Models) -> Encode:
    template = None
    if config.source.chat_template:
        try:
            template = config.source.chat_template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"source.chat_template must be a readable Jinja file: {error}") from error
    return ChatEncoder(models.target_words, models.drafter_words, models.pair, template).encode
