"""Chat prompts: a message or a whole conversation, as ids of the target and as pieces of the drafter."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from stages.chat_template import ChatTemplate, Message, Segment, is_word
from stages.pair import How, Pair
from stages.vocabulary import Vocabulary

Ids = tuple[list[int], list[int]]  # the target's ids and the drafter's pieces of one prompt


class Conversation(Protocol):
    """Makes prompts of conversations."""

    def encode(self, message: str) -> Ids:
        """A user's message as a conversation of its own; as `encode_conversation`."""
        ...

    def encode_conversation(self, messages: Sequence[Message]) -> Ids:
        """The prompt that asks for the next answer.

        What people wrote never becomes a special token, whatever it looks like.

        Args:
            messages: what has been said in order, each with `role` and `content`.

        Raises:
            ConfigError: no prompt can be made of these messages.
        """
        ...


class ChatEncoder:
    """Conversations by the target's chat template, for one target and one drafter.

    Args:
        target, drafter: the two vocabularies.
        pair: how the target's special tokens are mapped.
        template: Jinja text to use instead of the target's own chat template.

    Raises:
        ConfigError: as `ChatTemplate`.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary, pair: Pair, template: str | None = None) -> None:
        self.template = ChatTemplate(target, template)
        self._target, self._drafter = target, drafter
        self._mapped = {mapping.token: mapping for mapping in pair.specials}
        self._begin = drafter.encode("")  # BOS, where the drafter's tokenizer adds it

    def encode(self, message: str) -> Ids:
        """As `Conversation.encode`."""
        return self.encode_conversation([{"role": "user", "content": message}])

    def encode_conversation(self, messages: Sequence[Message]) -> Ids:
        """As `Conversation.encode_conversation`.

        The target's ids are those of `apply_chat_template(..., tokenize=True)` wherever no content holds a name of
        a special token. The drafter reads the same text cut its own way. A special token is there the drafter's
        of the same role or name, or its name written out, or, where the pair blocks it, nothing but a line break
        between words that would run together. BOS comes first where the drafter's tokenizer adds it, and once.

        Raises:
            ConfigError: as `ChatTemplate.segments`.
        """
        segments = self.template.segments(messages)
        tokens = _joined(segments, self._target)
        pieces = _joined(list(self._for_drafter(segments)), self._drafter)
        return tokens, pieces if pieces[: len(self._begin)] == self._begin else self._begin + pieces

    def _for_drafter(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        """The same with the drafter's special tokens; text that now touches is one run."""
        run, blocked = "", False
        for segment in segments:
            mapping = self._mapped[segment] if isinstance(segment, int) else None
            if mapping is None or mapping.how is How.SPELT:
                text = str(segment) if mapping is None else mapping.name
                run += "\n" + text if blocked and is_word(run[-1:]) and is_word(text[:1]) else text
            elif mapping.how is not How.BLOCKED:
                yield from ([run] if run else [])
                yield from mapping.pieces
                run = ""
            blocked = mapping is not None and mapping.how is How.BLOCKED
        yield from ([run] if run else [])


class PlainConversation:
    """Conversations for a target that has no chat template: the contents alone, a blank line between them.

    Such a target was trained on no roles, so none are written. It completes the last message.

    Args:
        target, drafter: the two vocabularies.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary) -> None:
        self._target, self._drafter = target, drafter

    def encode(self, message: str) -> Ids:
        """As `Conversation.encode`."""
        return self._target.encode(message), self._drafter.encode(message)

    def encode_conversation(self, messages: Sequence[Message]) -> Ids:
        """As `Conversation.encode_conversation`; never raises."""
        return self.encode("\n\n".join(message["content"] for message in messages))


def _joined(segments: Sequence[Segment], words: Vocabulary) -> list[int]:
    ids: list[int] = []
    for place, segment in enumerate(segments):
        ids += [segment] if isinstance(segment, int) else words.encode_text(segment, first=place == 0)
    return ids
