"""Exactness with grammars: the distribution is the target's own over the tokens that keep the text completable.

The reference knows a language as a list of texts. It never forces the next byte, because llguidance
then allows only the tokenizer's own spelling.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from random import Random

import pytest
import torch
from enumeration import EXACT, World, add_up, difference, true_distribution
from test_mixed_rows import world_of
from test_tree_exactness import KINDS, given_trees
from torch import Tensor
from whole_stages import emit, new_row, stages_of

from stages.sampling.grammars import Grammar, GrammarCompiler, GrammarSource
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource
from store.errors import ConfigError

END = 5
TOKENS = [b"a", b"b", b"ab", b"c", b"bc", None, b"ca"]  # of `world_of`, which has seven
TEXTS = ["a", "ac", "b", "bc", "ca", "cb"]
LANGUAGE = GrammarSource("grammar", "start: /[ab]c?|c[ab]/")
PENALISED = SamplingParams(frequency_penalty=0.8, presence_penalty=-0.5)


def spell(text: bytes) -> list[int] | None:
    """Split a text into tokens, taking the longest that fits; None where no token fits."""
    spelt: list[int] = []
    while text:
        fitting = [token for token in WORDS if token and text.startswith(token)]
        if not fitting:
            return None
        spelt.append(WORDS.index(max(fitting, key=len)))
        text = text[len(max(fitting, key=len)) :]
    return spelt


def allowed_tokens(emitted: Sequence[int]) -> list[int]:
    """The tokens after which one of the texts can still be reached, and the end after a complete text."""
    text = b"".join(TOKENS[token] or b"" for token in emitted).decode()
    going = [
        number
        for number, token in enumerate(TOKENS)
        if token and any(known.startswith(text + token.decode()) for known in TEXTS)
    ]
    return going + [END] * (text in TEXTS)


class GrammarWorld(World):
    """A world whose target's distribution is limited to the tokens that the language allows."""

    def target_distribution(self, emitted: tuple[int, ...]) -> Tensor:
        probs = super().target_distribution(emitted)
        logits = probs.log() - 0.8 * torch.tensor([emitted.count(n) for n in range(len(probs))])
        logits += 0.5 * torch.tensor([n in emitted for n in range(len(probs))])
        weights = torch.zeros_like(probs)
        weights[allowed_tokens(emitted)] = logits[allowed_tokens(emitted)].exp()
        return weights / weights.sum()


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    pytest.importorskip("llguidance")
    return GrammarCompiler(TOKENS, lambda text: [0] * len(text), [END]).compile(LANGUAGE)


@pytest.mark.parametrize("trees", [False, True])
def test_a_constrained_row_has_the_targets_distribution_over_the_language(grammar: Grammar, trees: bool):
    world = world_of("nested", 7, target_support=7, drafter_support=1, ends=(END,))

    def run(rng: RandomSource) -> tuple[int, ...]:
        row, stages = new_row(rng, 4), given_trees(world, KINDS["some"]) if trees else stages_of(world)
        row.transforms = (*PENALISED.make_transforms(row.tokens), grammar.start())
        return emit(stages, [row], row, 99)

    distribution = add_up(run)
    wanted = true_distribution(GrammarWorld(**vars(world)), 4)
    assert all(tokens[-1] == END for tokens in wanted)
    assert difference(distribution, wanted) < EXACT
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT)


WORDS = [*TOKENS, *(bytes([byte]) for byte in b'{}":, 0123456789'), b'":', b'{"', b'","', b"true", b"12", b"\n"]
SCHEMA = {
    "type": "object",
    "properties": {"abc": {"type": "integer", "maximum": 999}, "b": {"enum": ["ab", "c", True]}},
    "required": ["abc", "b"],
    "additionalProperties": False,
}
SOURCES = [
    GrammarSource("json_schema", json.dumps(SCHEMA)),
    GrammarSource("grammar", 'root ::= "ab" "ca"* | "abca" "b"+'),
    GrammarSource("grammar", 'start: "abcab" | "abca" "c"*'),
]


@pytest.mark.parametrize("source", SOURCES, ids=["schema", "gbnf", "lark"])
def test_the_mask_depends_on_the_history_alone(source: GrammarSource):
    """After any walk, refused drafts included, the mask equals that of a matcher that reads the history at once."""
    pytest.importorskip("llguidance")
    grammar, random = GrammarCompiler(WORDS, spell, [END]).compile(source), Random(1)
    walked, history, choices = grammar.start(), list[int](), 0
    for _ in range(150):
        got, wanted = torch.zeros(len(WORDS) + 3), torch.zeros(len(WORDS) + 3)
        walked.apply(got, history)
        grammar.start().apply(wanted, history)
        assert torch.equal(got, wanted), history
        allowed = (got == 0).nonzero()[:, 0].tolist()
        choices += allowed != [END]
        history = [*history, random.choice(allowed) if random.random() < 0.85 else random.randrange(len(WORDS))]
        if random.random() < (0.7 if END in history else 0.2):
            history = history[: random.randrange(len(history))]
    assert choices > 30


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("json_schema", '{"type": "strin"}'),
        GrammarSource("json_schema", '{"$ref": "http://example.com/schema"}'),
        GrammarSource("grammar", 'start: "a'),
        GrammarSource("grammar", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(5000)) + 'a5000: "a"'),
        GrammarSource("grammar", f"root ::= {'(' * 20_000}"),
        GrammarSource("json_schema", json.dumps({"enum": ["a" * 70_000]})),
    ],
    ids=["type", "reference", "syntax", "chain", "nesting", "length"],
)
def test_a_grammar_that_is_not_valid_is_refused(source: GrammarSource):
    pytest.importorskip("llguidance")
    with pytest.raises(ConfigError, match="must have a valid grammar, but"):
        GrammarCompiler(TOKENS, spell, [END]).compile(source)


LIST = {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}
TO_LIST = {"$ref": "#/$defs/list"}


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ('{"$ref": "#"}', "refer to itself without anything more"),
        ('{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "refer to itself"),
        (json.dumps({"$defs": {"list": LIST}, "allOf": [TO_LIST, TO_LIST]}), "combined with another in 'allOf'"),
        (json.dumps({"$defs": {"list": LIST}, **TO_LIST}), None),
    ],
    ids=["itself", "each other", "all of", "list"],
)
def test_a_recursive_schema_works_or_is_refused_in_own_words(source: str, refused: str | None):
    pytest.importorskip("llguidance")
    compiler = GrammarCompiler([*(bytes([byte]) for byte in range(256)), None], list, [256])
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        compiler.compile(GrammarSource("json_schema", source))


def test_a_target_without_an_end_of_sequence_is_refused():
    pytest.importorskip("llguidance")
    with pytest.raises(ConfigError, match="end of sequence"):
        GrammarCompiler(TOKENS, spell, []).compile(LANGUAGE)


def test_where_nothing_is_allowed_the_sequence_may_end():
    pytest.importorskip("llguidance")
    walked = GrammarCompiler(WORDS, spell, [END]).compile(GrammarSource("grammar", 'start: "ab"')).start()
    logits = torch.zeros(len(WORDS))
    walked.apply(logits, [WORDS.index(b"c"), WORDS.index(b"c")])
    assert (logits == 0).nonzero()[:, 0].tolist() == [END]
