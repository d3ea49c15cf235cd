"""Admission: a prompt's text becomes a row, in the ids of the target and in the pieces of the drafter.

With `source.chat = "auto"` a prompt is a message in the target's chat template if the target has one, except for the
built-in sources `docs` and `code`: these are texts to continue, not questions.
"""

from collections.abc import Callable, Iterable, Sequence

from pipeline.assembly.models import Models
from pipeline.config.sections import SourceSettings
from pipeline.config.settings import Config
from pipeline.loop import UnfitPromptError
from pipeline.sources.corpus import TEXT_STREAMS
from stages.contract.blocks import SequenceState
from stages.sampling.random_source import SeededRandomSource
from stages.vocabulary.chat import ChatEncoder
from store.errors import ConfigError
from store.events import PromptReceived

Ids = tuple[list[int], list[int]]  # the target's ids and the drafter's pieces
Encode = Callable[[PromptReceived], Ids]
BUILTIN = "builtin:"


def make_admission(config: Config, models: Models) -> Callable[[PromptReceived], SequenceState]:
    """Makes sequences of prompts; refuses those without a token and those that are too long for the target's context.

    Raises:
        ConfigError: prompts are to be chat prompts, but there is no template that can be used.
    """
    encode = prompt_encoder(config, models)
    budget = config.sampling.max_new_tokens
    most = models.target.max_length - budget - 1

    def prepare(prompt: PromptReceived) -> SequenceState:
        try:
            tokens, pieces = encode(prompt)
        except ConfigError as error:
            raise UnfitPromptError(str(error)) from error
        if not 0 < len(tokens) <= most:
            allowed = f"1 to {most} of the target's tokens"
            raise UnfitPromptError(f"the prompt {prompt.prompt_id} must have {allowed}, got {len(tokens)}")
        if not pieces:
            raise UnfitPromptError(f"the prompt {prompt.prompt_id} must have a token of the drafter, got none")
        draws = SeededRandomSource(config.seed, prompt.offset)
        text = prompt.text if config.log.text else ""  # a row is kept in checkpoints too
        return SequenceState(
            prompt.offset, prompt.prompt_id, prompt.dataset, text, tokens, len(tokens), pieces, draws, budget
        )

    return prepare


def find_fault(prompt: PromptReceived, admissions: Iterable[Callable[[PromptReceived], SequenceState]]) -> str | None:
    """Return why none of several targets admits a prompt; None if one does.

    Args:
        prompt: the prompt.
        admissions: of each target, as from `make_admission`.
    """
    reason: str | None = None
    for admit in admissions:
        try:
            admit(prompt)
        except UnfitPromptError as error:
            reason = reason or str(error)
        else:
            return None
    return reason


def prompt_encoder(config: Config, models: Models) -> Encode:
    """Encodes prompts as configured: as text alone, or as a message in the target's chat template. The encoder raises
    ConfigError for a text of which the template makes no prompt. Of the pieces it returns what the drafter reads.

    Raises:
        ConfigError: prompts are to be chat prompts, but there is no template that can be used.
    """
    encode = _whole_prompt_encoder(config, models)

    def encode_for_both(prompt: PromptReceived) -> Ids:
        tokens, pieces = encode(prompt)
        return tokens, models.clip_prompt(pieces)

    return encode_for_both


def _whole_prompt_encoder(config: Config, models: Models) -> Encode:
    plain = _plain(models)
    if not _uses_chat(config.source, models):
        return lambda prompt: plain(prompt.text)
    chat, completed = _make_chat_encoder(config.source, models).encode, _list_completed(config)
    return lambda prompt: (plain if prompt.dataset in completed else chat)(prompt.text)


def find_preamble(config: Config, models: Models) -> Ids:
    """Return the target's and the drafter's ids with which prompts in the chat template begin; none without one.

    Raises:
        ConfigError: as `prompt_encoder`.
    """
    if not _uses_chat(config.source, models):
        return [], []
    return _make_chat_encoder(config.source, models).find_preamble()


def describe_chat(config: Config, models: Models) -> str | None:
    """Return a line on what is done with the target's chat template, or None if it is not considered."""
    if not (_uses_chat(config.source, models) and _has_template(config.source, models)):
        return None
    completed = _list_completed(config)
    if len(completed) == len(config.sources):
        return f"chat: built-in prompts are completed as text; --chat puts them into the chat template of {models.name}"
    line = f"prompts are put into the chat template of {models.name}"
    if config.source.chat is True:
        return f"chat: {line}"
    if not completed:
        return f"chat: {line}; --no-chat completes them as text"
    return f"chat: the other {line}; {' and '.join(BUILTIN + name for name in completed)} is completed as text"


def _uses_chat(settings: SourceSettings, models: Models) -> bool:
    """Whether any prompt may be rendered with a chat template."""
    return _has_template(settings, models) if settings.chat == "auto" else settings.chat


def _has_template(settings: SourceSettings, models: Models) -> bool:
    return settings.chat_template is not None or bool(models.target_vocabulary.tokenizer.chat_template)


def _list_completed(config: Config) -> Sequence[str]:
    """The datasets of sources whose texts are continued, not answered."""
    if config.source.chat != "auto":
        return ()
    builtin = [spec.removeprefix(BUILTIN) for spec in config.sources if spec.startswith(BUILTIN)]
    return [name for name in builtin if name in TEXT_STREAMS]


def _plain(models: Models) -> Callable[[str], Ids]:
    return lambda text: (models.target_vocabulary.encode(text), models.drafter_vocabulary.encode(text))


def _make_chat_encoder(settings: SourceSettings, models: Models) -> ChatEncoder:
    template = chat_template(settings)
    try:
        return ChatEncoder(models.target_vocabulary, models.drafter_vocabulary, models.pair, template)
    except ConfigError as error:
        if settings.chat != "auto":
            raise
        raise ConfigError(f"{error} Or complete prompts as text with --no-chat (source.chat = false).") from error


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
