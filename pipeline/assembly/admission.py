"""Admission: a prompt's text becomes a row, in the ids of the target and in the pieces of the drafter.

With `source.chat = "auto"` a prompt is a message in the target's chat template if the target has one, except for the
built-in sources `docs` and `code`: these are texts to continue, not questions.
"""

from collections.abc import Iterable

from pipeline.assembly.models import Models
from pipeline.assembly.stages import make_sampling_params
from pipeline.config.sections import SourceSettings
from pipeline.config.settings import Config
from pipeline.loop import UnfitPromptError
from pipeline.sources.conversations import from_text
from pipeline.sources.corpus import TEXT_STREAMS
from stages.contract.blocks import SequenceState
from stages.sampling.noise import Noise
from stages.sampling.random_source import SeededRandomSource
from stages.verification.rules import MODES
from stages.vocabulary.chat import ChatEncoder, Ids, PlainConversation
from store.errors import ConfigError
from store.events import PromptReceived

BUILTIN = "builtin:"


class Admission:
    """Encodes the prompts of one target as configured, and makes sequences of them."""

    def __init__(self, config: Config, models: Models) -> None:
        self._config, self._models, self._chat = config, models, None
        settings, own_template = config.source, models.target_vocabulary.tokenizer.chat_template
        chosen = settings.chat_template is not None or bool(own_template) if settings.chat == "auto" else settings.chat
        if chosen:
            template = read_chat_template(settings)
            try:
                self._chat = ChatEncoder(models.target_vocabulary, models.drafter_vocabulary, models.pair, template)
            except ConfigError as error:
                if settings.chat != "auto":
                    raise
                way_out = "Or complete prompts as text with --no-chat (source.chat = false)."
                raise ConfigError(f"{error} {way_out}") from error
        self._coupled = MODES[config.draft.mode].coupled and not make_sampling_params(config.sampling).is_greedy
        builtin = [spec.removeprefix(BUILTIN) for spec in config.sources if spec.startswith(BUILTIN)]
        # Datasets of texts that are continued, not answered.
        self._continued = [name for name in builtin if name in TEXT_STREAMS] if settings.chat == "auto" else []

    def encode(self, prompt: PromptReceived) -> Ids:
        """Return the target's ids, and the pieces that the drafter reads."""
        models, conversation = self._models, from_text(prompt.text)
        if conversation:
            plain = PlainConversation(models.target_vocabulary, models.drafter_vocabulary)
            tokens, pieces = (self._chat or plain).encode_conversation(*conversation)
        elif self._chat and prompt.dataset not in self._continued:
            tokens, pieces = self._chat.encode(prompt.text)
        else:
            tokens, pieces = models.target_vocabulary.encode(prompt.text), models.drafter_vocabulary.encode(prompt.text)
        return tokens, models.clip_prompt(pieces)

    def admit(self, prompt: PromptReceived) -> SequenceState:
        """Make a sequence of a prompt. Raises `UnfitPromptError` for one that the models cannot take."""
        try:
            tokens, pieces = self.encode(prompt)
        except ConfigError as error:
            raise UnfitPromptError(str(error)) from error
        budget = self._config.sampling.max_new_tokens
        most = self._models.target.max_length - budget - 1
        if not 0 < len(tokens) <= most:
            allowed = f"1 to {most} of the target's tokens"
            raise UnfitPromptError(f"the prompt {prompt.prompt_id} must have {allowed}, got {len(tokens)}")
        if not pieces:
            raise UnfitPromptError(f"the prompt {prompt.prompt_id} must have a token of the drafter, got none")
        draws = SeededRandomSource(self._config.seed, prompt.offset)
        noise = Noise.from_seed(self._config.seed, prompt.offset) if self._coupled else None
        text = prompt.text if self._config.log.text else ""  # a row is kept in checkpoints too
        return SequenceState(
            prompt.offset,
            prompt.prompt_id,
            prompt.dataset,
            text,
            tokens,
            len(tokens),
            pieces,
            draws,
            budget,
            noise=noise,
        )

    def find_preamble(self) -> Ids:
        """Return the target's and the drafter's ids with which chat prompts begin; none where there are none."""
        return self._chat.find_preamble() if self._chat else ([], [])

    def describe(self) -> str | None:
        """Return a line on what is done with the target's chat template; None if it is not used."""
        if self._chat is None:
            return None
        name, continued = self._models.name, self._continued
        if len(continued) == len(self._config.sources):
            return f"chat: built-in prompts are completed as text; --chat puts them into the chat template of {name}"
        line = f"prompts are put into the chat template of {name}"
        if self._config.source.chat is True:
            return f"chat: {line}"
        if not continued:
            return f"chat: {line}; --no-chat completes them as text"
        return f"chat: the other {line}; {' and '.join(BUILTIN + one for one in continued)} is completed as text"


def find_fault(prompt: PromptReceived, admissions: Iterable[Admission]) -> str | None:
    """Return why none of several targets admits a prompt; None if one does."""
    reason: str | None = None
    for admission in admissions:
        try:
            admission.admit(prompt)
        except UnfitPromptError as error:
            reason = reason or str(error)
        else:
            return None
    return reason


def read_chat_template(settings: SourceSettings) -> str | None:
    """Return the template that the settings name; None for the target's own. Raises `ConfigError`."""
    if settings.chat_template is None:
        return None
    try:
        return settings.chat_template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"source.chat_template must be a readable Jinja file: {error}") from error
