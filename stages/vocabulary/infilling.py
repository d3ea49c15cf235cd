"""Prompts of models that were trained to fill in the middle: what comes before and after, between control tokens."""

from collections.abc import Callable, Sequence

from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ConfigError

# The tokens before the beginning, before the end, and before the middle, which the model writes.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
)
# Further tokens after which such models go on with another file.
ENDS = ("<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|endoftext|>")


def encode_gap(
    vocabulary: Vocabulary, before: str, after: str, encode_part: Callable[[str], Sequence[int]]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the tokens of a prompt for the text between two others, and those that end a completion of it besides the
    model's ends. Raises `ConfigError` for a model without such tokens.
    """
    specials = vocabulary.specials
    form = next((form for form in FORMS if all(name in specials for name in form)), None)
    if form is None:
        name = vocabulary.name
        raise ConfigError(f"suffix must be empty for {name}, whose tokenizer has no tokens to fill in the middle")
    begin, hole, middle = (specials[name] for name in form)
    ends = tuple(specials[name] for name in (*form, *ENDS) if name in specials)
    return [begin, *encode_part(before), hole, *encode_part(after), middle], ends
