"""Texts that every machine has: parts of the Python standard library, word problems, and tasks in Rust.

The built-in streams of texts (`builtin:docs`, `builtin:code`) and part of the built-in models' training
text come from here. Modules are split once, by a hash of their path: one in ten is *held out*.
Streams are made from held-out modules only, models are trained on the others, so that a replay
never gives a model a text that it was trained on.

The word problems (`builtin:questions`) are of elementary arithmetic. A line of `word_problems.tsv` is a template: how
the answer follows from its numbers, a tab, the question. Each has its own situation. A stream uses all of them, in
random order, before it uses one again, so that two neighbours have little in common but their kind.

The tasks (`builtin:rust`) ask for functions in Rust, which the built-in drafters were not trained on: a stream that
goes on with them shows a drift, and what is learned then.
"""

import ast
import os
import re
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from random import Random

from typing_extensions import override

from pipeline.sources.rows import Rows, SourceRow, nearest
from store.errors import SourceError

TEXT_STREAMS = ("docs", "code")  # texts to continue
BUILTIN_STREAMS = (*TEXT_STREAMS, "questions", "rust")
QUESTIONS = 1000  # in the stream of that name
NAMES = ("Ada", "Ben", "Chloe", "Deepak", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Keiko", "Liam", "Mara")
TEMPLATES = Path(__file__).with_name("word_problems.tsv")
TASKS = Path(__file__).with_name("rust_tasks.txt")  # what the function does, one to a line
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo", "ensurepip"}
    | {"encodings", "msilib", "tkinter", "pydoc_data", "__pycache__"}
)
MAX_FUNCTION_CHARACTERS = 1200
MIN_DOCSTRING_CHARACTERS = 80


@dataclass(frozen=True)
class Passage:
    """A text that is split into a prompt and the rest."""

    name: str  # where the text comes from, such as `json.decoder.JSONDecoder.decode`
    prompt: str  # the opening, at least one character
    rest: str  # the text after the prompt; a reference answer, never shown to a model in a replay

    @property
    def text(self) -> str:
        """The prompt and the rest, joined."""
        return self.prompt + self.rest


def is_held_out(module: str) -> bool:
    """Return True for the tenth of all modules that streams are made from and models never see."""
    return zlib.crc32(module.encode()) % 10 == 0


@cache
def _modules(held_out: bool) -> tuple[tuple[str, str, ast.Module], ...]:
    """Return `(dotted name, source, syntax tree)` of the standard library's own modules, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(_list_files(root)):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if path.suffix != ".py" or is_held_out(name) != held_out:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
        found.append((name, source, tree))
    return tuple(found)


def _list_files(root: Path) -> Iterator[Path]:
    """Yield the files below a folder, without the skipped folders: the packages of others can be many."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names)


def _split_after_words(name: str, text: str, words: int) -> Passage | None:
    """Split `text` after its first `words` words; None if nothing would be left."""
    opening = re.match(rf"(?:\s*\S+){{0,{words}}}", text)
    position = opening.end() if opening else 0
    return Passage(name, text[:position], text[position:]) if text[position:].strip() else None


def documentation(*, held_out: bool) -> Iterator[Passage]:
    """Yield docstrings of modules, classes and functions, and the topics of the language reference."""
    for module, _, tree in _modules(held_out):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                name = f"{module}.{getattr(node, 'name', '')}".rstrip(".")
                passage = _split_after_words(name, text, 12)
                if len(text) >= MIN_DOCSTRING_CHARACTERS and passage:
                    yield passage
    yield from _topics(held_out=held_out)


def _topics(*, held_out: bool) -> Iterator[Passage]:
    """Yield runs of paragraphs of `pydoc_data.topics`, about 600 characters each."""
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        if is_held_out(topic) != held_out:
            continue
        run = ""
        for number, paragraph in enumerate(text.split("\n\n")):
            run = f"{run}\n\n{paragraph}" if run else paragraph
            if len(run) >= 600:
                passage = _split_after_words(f"topic:{topic}:{number}", run.lstrip("\n"), 12)
                run = ""
                if passage:
                    yield passage


def read_usual_texts(number: int = 16, characters: int = 400) -> list[str]:
    """Return parts of the language reference, evenly spread: prose with examples of code."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(text for _, text in sorted(topics.items()))
    step = len(whole) // number
    return [whole[begin : begin + characters] for begin in range(0, number * step, step)]


def functions(*, held_out: bool) -> Iterator[Passage]:
    """Yield functions that have a docstring; the prompt is the signature with the docstring."""
    for module, source, tree in _modules(held_out):
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.body[1:]:
                yield _function_passage(f"{module}.{node.name}", lines, node)


def _function_passage(name: str, lines: list[str], node: ast.FunctionDef) -> Passage:
    first, indent = node.lineno - 1, node.col_offset

    def dedent(start: int, end: int | None) -> str:
        return "".join(line[indent:] or "\n" for line in lines[start:end])

    docstring_end = node.body[0].end_lineno
    prompt = dedent(first, docstring_end)
    rest = dedent(docstring_end or first, node.end_lineno).rstrip("\n")
    budget = max(MAX_FUNCTION_CHARACTERS - len(prompt), 200)
    return Passage(name, prompt, rest[:budget])


def make_questions(seed: int, number: int) -> list[tuple[str, str]]:
    """Return this many questions, each with its answer."""
    lines = [line.split("\t") for line in TEMPLATES.read_text(encoding="utf-8").splitlines()]
    templates = [(question, compile(answer, str(TEMPLATES), "eval")) for answer, question in lines]
    random, found = Random(seed), list[tuple[str, str]]()
    while len(found) < number:
        for question, answer in random.sample(templates, len(templates)):
            numbers = {"a": random.randint(16, 40), "b": random.randint(4, 9), "c": random.randint(2, 4)}
            text = question.format(name=random.choice(NAMES), **numbers)
            found.append((text, str(eval(answer, {}, numbers))))  # noqa: S307 (a formula of our own)
    return found[:number]


def stream(kind: str, seed: int = 0) -> list[Passage]:
    """Return the passages of a built-in stream, one of `BUILTIN_STREAMS`, shuffled by `seed`.

    Prompts longer than 700 characters are left out: the built-in models have a context of 1,024 tokens.
    """
    if kind == "questions":
        numbered = enumerate(make_questions(seed, QUESTIONS))
        return [Passage(f"question:{number}", question, answer) for number, (question, answer) in numbered]
    if kind == "rust":
        tasks = TASKS.read_text(encoding="utf-8").splitlines()
        chosen = [Passage("rust", f"Write a function in Rust that {task}.", "") for task in tasks]
    else:
        passages = {"docs": documentation, "code": functions}[kind](held_out=True)
        chosen = [passage for passage in passages if len(passage.prompt) <= 700]
    Random(seed).shuffle(chosen)
    return chosen


class BuiltinRows(Rows):
    """A built-in stream, shuffled by `seed`."""

    columns: Collection[str] = ("prompt_id", "prompt", "reference")

    def __init__(self, kind: str, seed: int) -> None:
        if kind not in BUILTIN_STREAMS:
            known = ", ".join(f"'builtin:{name}'" for name in BUILTIN_STREAMS)
            hint = nearest(f"builtin:{kind}", (f"builtin:{name}" for name in BUILTIN_STREAMS))
            raise SourceError(f"A built-in source must be one of {known}, got 'builtin:{kind}'.{hint}")
        self._kind = kind
        self._seed = seed

    @override
    def count(self) -> int:
        """Return the exact number of passages."""
        return len(self._passages)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        for line, passage in enumerate(self._passages, start=1):
            name = f"{passage.name}:{line}"  # overloads and properties share a name
            yield SourceRow(line, {"prompt_id": name, "prompt": passage.prompt, "reference": passage.rest})

    @cached_property
    def _passages(self) -> list[Passage]:
        return stream(self._kind, self._seed)
