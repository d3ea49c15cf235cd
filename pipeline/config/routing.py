"""The target of a prompt that does not name one."""

from dataclasses import dataclass

from store.errors import ConfigError


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
