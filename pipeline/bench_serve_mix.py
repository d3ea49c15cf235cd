"""What the load generator asks for: prompts of any source as requests of several kinds, the same for equal seeds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

LEAVES_WITHIN = 8  # chunks, of a client that leaves in the middle


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: from 0.
        prompt: a text; of a chat its one message.
        leave_after: chunks of the stream after which the client leaves; None for one that stays.
    """

    number: int
    prompt: str
    chat: bool
    stream: bool
    temperature: float
    max_tokens: int
    leave_after: int | None = None

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """As OpenAI's interface has it. Usage is asked for, since chunks do not say how many tokens they have."""
        asked: dict[str, Any] = {"model": model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        asked["seed"] = self.number
        asked |= {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        return asked | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of requests, each drawn by itself.

    Attributes:
        stream, chat, greedy: shares of all; what is not greedy has temperature 1.
        leave: share of the streams whose clients leave in the middle.
        max_tokens: one of these, evenly.
    """

    stream: float = 0.75
    chat: float = 0.5
    greedy: float = 0.5
    leave: float = 0.05
    max_tokens: tuple[int, ...] = (16, 32, 64, 128)


def requests(prompts: Sequence[str], mix: Mix, seed: int) -> Iterator[Request]:
    """Requests without end: the prompts in an order that is shuffled anew each time round."""
    random, number = Random(seed), 0
    while True:
        for prompt in random.sample(prompts, len(prompts)):
            stream, chat, greedy, leaves = (random.random() for _ in range(4))
            max_tokens, after = random.choice(mix.max_tokens), random.randint(1, LEAVES_WITHIN)
            yield Request(
                number,
                prompt,
                chat=chat < mix.chat,
                stream=stream < mix.stream,
                temperature=0.0 if greedy < mix.greedy else 1.0,
                max_tokens=max_tokens,
                leave_after=after if stream < mix.stream and leaves < mix.leave else None,
            )
            number += 1


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests come if they come by chance: seconds from the beginning, `rate` per second on average."""
    random, at, found = Random(seed), 0.0, list[float]()
    while (at := at + random.expovariate(rate)) < seconds:
        found.append(at)
    return found
