"""Checks of words, lines of documents, commit subjects, function names and docstrings.

python tests/support/style_checks.py            the counts, each with its ceiling
python tests/support/style_checks.py told       where a word or a rule is broken, by file
python tests/support/style_checks.py --lower    sets the ceilings to today's counts, where those are lower
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from style_words import AS_WRITTEN, NOT_READ, WORDS, Word

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = ROOT / "tests" / "style_ceilings.json"
PACKAGES = ("dashboards", "pipeline", "stages", "store")
ENDINGS = {".py", ".md", ".html", ".sql"}
BASE_COMMIT = "44a5856"  # the last one before the rules of style; its subject is not checked
COLUMNS, SUBJECT = 100, 60


class Finding(NamedTuple):
    """One place where a rule is broken."""

    rule: str
    path: str
    line: int
    text: str


@cache
def files() -> dict[str, str]:
    """The text of every file that is checked, by its path from the root."""
    folders = [*PACKAGES, "tests", "docs", "examples"]
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    names = {path.relative_to(ROOT).as_posix(): path for path in paths if path.suffix in ENDINGS}
    return {name: names[name].read_text(encoding="utf-8") for name in sorted(names) if name not in NOT_READ}


# Words


def take_apart(text: str) -> str:
    """A text in lower case with its identifiers as words, line for line."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


@cache
def word_pattern(words: tuple[Word, ...]) -> re.Pattern[str]:
    """One pattern of all words; without groups, which would make it slow."""
    return re.compile(rf"\b(?:{'|'.join(word.pattern for word in words)})\b")


@cache
def word_of(match: str, words: tuple[Word, ...]) -> Word:
    """The word of the list that a match is."""
    return next(word for word in words if re.fullmatch(word.pattern, match))


def is_allowed(match: re.Match[str], word: Word) -> bool:
    """Whether a word is found inside a phrase that is allowed."""
    start = max(0, match.start() - 60)
    phrases = (
        phrase
        for pattern, _ in word.allowed
        for phrase in re.compile(pattern).finditer(match.string, start, match.end() + 60)
    )
    return any(phrase.start() <= match.start() and match.end() <= phrase.end() for phrase in phrases)


def blank_quotations(name: str, text: str) -> str:
    """A document without the passages that quote words as they were; their line breaks stay."""
    if name not in AS_WRITTEN:
        return text
    passage = re.compile(r"<!-- words: as written -->.*?(?:<!-- words: checked -->|\Z)", re.DOTALL)
    return passage.sub(lambda match: "\n" * match[0].count("\n"), text)


def find_words(name: str, text: str, words: tuple[Word, ...] = WORDS) -> Iterator[Finding]:
    """Every word of the list in a text."""
    lines = text.splitlines()
    apart = take_apart(blank_quotations(name, text))
    for match in word_pattern(words).finditer(apart):
        word = word_of(match[0], words)
        if not is_allowed(match, word):
            line = apart.count("\n", 0, match.start())
            yield Finding(word.name, name, line + 1, lines[line].strip())


# Lines of documents


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a document outside code blocks, tables, HTML and lines that are links."""
    fenced = False
    after_blank = True
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            fenced = not fenced
        code = fenced or (line.startswith("    ") and after_blank)
        after_blank = not bare or (code and not fenced)
        link = re.fullmatch(r"(?:[-*] )?(?:!?\[[^\]]*\]\([^)]*\)|\[[^\]]*\]:.*|<?https?://\S+>?)[.,;:]?", bare)
        if not (code or bare.startswith(("```", "|", "<")) or link):
            yield number, line


def is_one_sentence(line: str) -> bool:
    """Whether a line ends like a sentence and no other sentence ends before."""
    bare = re.sub(r"`[^`]*`|\b(?:e\.g|i\.e|cf|vs|[Ff]ig|[Nn]o|[Ee]q)\.", "x", line.strip())
    return bool(re.search(r"[.!?:;)\]*]$", bare)) and not re.search(r"[.!?][)\"*]* +[\[(*\"]*[A-Z0-9x]", bare)


def find_long_lines(name: str, text: str) -> Iterator[Finding]:
    """Lines of a document that are longer than they may be and hold no sentence of their own."""
    for number, line in prose_lines(blank_quotations(name, text)):
        if len(line) > COLUMNS and not is_one_sentence(line):
            yield Finding("long lines in documents", name, number, f"{len(line)} columns: {line.strip()[:80]}...")


# Commit subjects

NOT_IMPERATIVE = frozenset({"a", "an", "the", "this", "these", "some", "now", "no", "when", "while", "where", "after"})
VERBS_IN_S = frozenset(
    {"access", "address", "bias", "bypass", "compress", "discuss", "express", "focus", "pass", "press", "process"}
)
VERBS_IN_ED = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed", "weed"})
VERBS_IN_ING = frozenset({"bring", "ping", "ring", "spring", "string", "swing"})


def fault_of_subject(subject: str) -> str:
    """The fault of the subject of a commit; empty if there is none."""
    first = re.split(r"\W", subject, maxsplit=1)[0]
    if len(subject) >= SUBJECT:
        return f"has {len(subject)} characters, must have fewer than {SUBJECT}"
    if subject.endswith("."):
        return "ends with a full stop"
    if not first[:1].isupper():
        return "does not begin with a capital letter"
    verb = first.lower()
    ends_like_a_form = (
        (verb.endswith("ed") and verb not in VERBS_IN_ED)
        or (verb.endswith("ing") and verb not in VERBS_IN_ING)
        or (verb.endswith("s") and verb not in VERBS_IN_S)
    )
    return f"begins with {first}, not with an imperative" if verb in NOT_IMPERATIVE or ends_like_a_form else ""


def subjects_since(base: str) -> list[tuple[str, str]] | None:
    """(commit, subject) of every commit after a base; None where the history does not reach that far."""
    command = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in done.stdout.splitlines()]


# Names of functions

PREPOSITIONS = frozenset(
    "about above across after again against along among around as at before behind below beneath beside between beyond "
    "by down during except for from in inside into near of off on onto out outside over past per round since through "
    "to toward towards under until up upon via with within without".split()
)
IRREGULAR = frozenset(
    "been begun bought bound broken brought built caught chosen cut dealt done drawn driven eaten fallen felt found "
    "forgotten frozen given gone held hidden kept known laid lain led left lent lost made meant met paid proven "
    "risen run seen sent set shown shut sold spent spoken spread stood struck sunk swept taken taught thought told "
    "torn understood won worn written".split()
) - {"cut", "run", "set", "shut", "spread"}  # these are their own infinitives
PARTICLES = frozenset("away back down in off on out over up".split())


def is_participle(word: str) -> bool:
    """Whether a lower-case word reads as a past participle."""
    return word in IRREGULAR or (word.endswith("ed") and len(word) > 3 and word not in VERBS_IN_ED)


def is_bare(name: str) -> bool:
    """Whether a function's name is a preposition or a participle alone, or with a particle (`taken_out`)."""
    match [part for part in take_apart(name).split() if part]:
        case [word]:
            return word in PREPOSITIONS or is_participle(word)
        case [word, particle]:
            return is_participle(word) and particle in PARTICLES
    return False


def is_exempt(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is read as a value: a property, or a fixture of pytest; or whether its name is another's."""
    names = (ast.unparse(part).split("(")[0].rpartition(".")[2] for part in node.decorator_list)
    return any(name in {"property", "cached_property", "fixture", "setter", "override"} for name in names)


Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def walk_statements(node: ast.AST) -> Iterator[Documented]:
    """A node and the classes and functions in it, without a look into expressions."""
    if isinstance(node, Documented):
        yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from walk_statements(child)


@cache
def nodes_of(text: str) -> tuple[Documented, ...]:
    """The module, its classes and its functions."""
    return tuple(walk_statements(ast.parse(text)))


def find_bare_names(name: str, text: str) -> Iterator[Finding]:
    """Functions and methods named by a preposition or a participle."""
    for node in nodes_of(text):
        if isinstance(node, Function) and is_bare(node.name) and not is_exempt(node):
            yield Finding(f"bare names in {name.split('/', maxsplit=1)[0]}", name, node.lineno, node.name)


# Docstrings


def find_poor_docstrings(name: str, text: str) -> Iterator[Finding]:
    """Docstrings of fewer than four words, and those that only point elsewhere."""
    for node in nodes_of(text):
        docstring = ast.get_docstring(node, clean=False)
        line = getattr(node, "lineno", 1)
        if docstring is not None and len(docstring.split()) < 4:
            yield Finding(f"short docstrings in {name.split('/', maxsplit=1)[0]}", name, line, docstring)
        if docstring is not None and re.match(r"\s*(?:See|As|Like|Of) `?\w+[\w.]*`?\.?\s*$", docstring):
            yield Finding(f"docstrings that point in {name.split('/', maxsplit=1)[0]}", name, line, docstring)


# All of it


def find_all(texts: dict[str, str]) -> Iterator[Finding]:
    """Everything in these files that breaks a rule; commits are apart."""
    for name, text in texts.items():
        yield from find_words(name, text)
        if name.endswith(".md"):
            yield from find_long_lines(name, text)
        if name.endswith(".py"):
            yield from find_bare_names(name, text)
            if name.startswith(PACKAGES):
                yield from find_poor_docstrings(name, text)


@cache
def findings() -> tuple[Finding, ...]:
    """Everything in the project that breaks a rule."""
    return tuple(find_all(files()))


def rules() -> list[str]:
    """Every rule that has a count."""
    packages = [*PACKAGES, "tests"]
    return [
        *(word.name for word in WORDS),
        "long lines in documents",
        *(f"bare names in {package}" for package in packages),
        *(f"{kind} in {package}" for kind in ("short docstrings", "docstrings that point") for package in PACKAGES),
    ]


def ceilings() -> dict[str, int]:
    """The number of times that each rule may be broken; rules that are not named may not be broken."""
    return {rule: int(most) for rule, most in json.loads(CEILINGS.read_text(encoding="utf-8")).items()}


def lower_ceilings() -> None:
    """Write today's counts where they are below the ceilings, or where there is none yet."""
    counts, before = Counter(finding.rule for finding in findings()), ceilings() if CEILINGS.exists() else None
    lowered = {rule: counts[rule] if before is None else min(counts[rule], before.get(rule, 0)) for rule in rules()}
    CEILINGS.write_text(json.dumps({rule: most for rule, most in lowered.items() if most}, indent=1) + "\n")


def report(wanted: Iterable[str]) -> None:
    """Print the counts, or where these rules are broken."""
    wanted = set(wanted)
    found = [finding for finding in findings() if finding.rule in wanted]
    for finding in found:
        print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.text}")
    for path, count in Counter(finding.path for finding in found).most_common():
        print(f"{count:5} {path}")
    if not wanted:
        counts, most = Counter(finding.rule for finding in findings()), ceilings()
        for rule in rules():
            print(f"{counts[rule]:5} of {most.get(rule, 0):5}  {rule}")
        print(f"{sum(counts.values()):5} in all")


if __name__ == "__main__":
    if "--lower" in sys.argv:
        lower_ceilings()
    report([argument for argument in sys.argv[1:] if not argument.startswith("--")])
