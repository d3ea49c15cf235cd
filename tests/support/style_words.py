"""Words that the project does not use, what to write instead, and the phrases in which they are right.

A pattern is matched on lower-case text in which identifiers are taken apart: `LaneState` reads "lane state", `lanes_of`
reads "lanes of". An exception is a phrase with a reason; its words do not count.
"""

from typing import NamedTuple


class Word(NamedTuple):
    """A word or phrase to avoid.

    Args:
        name: under which it is counted.
        pattern: a regular expression; word boundaries are added.
        instead: what to write.
        allowed: phrases, as regular expressions, that contain the word and may be written, each with the reason.
    """

    name: str
    pattern: str
    instead: str
    allowed: tuple[tuple[str, str], ...] = ()


HABITS = (
    Word(
        "told",
        r"told|tells?|telling",
        "reports, passes, receives, determines",
        ((r"tells? (?:\w+ ){0,3}apart", "to tell apart is plain English"),),
    ),
    Word(
        "behind",
        "behind",
        "after",
        (
            (
                r"behind (?:a|the|its|your) (?:\w+ )?(?:proxy|proxies|load balancer|firewall|gateway)",
                "term of networks",
            ),
            (r"(?:lags?|lagged|lagging|fall|falls|falling|fell|far|left|\d+ \w+) behind", "the lag of a consumer"),
        ),
    ),
    Word("beside", "beside", "next to, during, in parallel with"),
    Word("anew", "anew", "again, from scratch"),
    Word("whoever", "whoever|whomever", "name them: callers, readers, users"),
    Word("for who", "(?:for|by|to|from|with|of) who", "name them: callers, readers, users"),
    Word("goes on", r"(?:go|goes|gone|going|went)\s+on", "continues, resumes"),
    Word(
        "stands",
        "stands?|stood",
        "is, holds, runs, remains",
        ((r"stands?\s+for", "what a symbol means"),),
    ),
    Word("says", "says?|said", "states, reports, shows"),
    Word("asked", "asks?|asked|asking", "requests, queries, calls"),
    Word("now and then", r"now\s+and\s+then", "periodically, how often"),
    Word("mend", "mend(?:s|ed|ing)?", "fix, repair"),
)

PRIVATE = (
    Word("lane", "lanes?", "target runner"),
    Word("coach", "coach(?:es)?", "learner"),
    Word("lesson", "lessons?", "training example"),
    Word(
        "notebook", "notebooks?", "example builder", ((r"(?:jupyter|example) notebooks?|notebooks?(?=/)", "Jupyter's"),)
    ),
    Word("tape", "tapes?", "source position"),
    Word("crew", "crews?", "worker pool"),
    Word("desk", "desks?", "request queue"),
    Word("law", "laws?", "distribution, probabilities", ((r"amdahl's law|law of large numbers|power law", "terms"),)),
    Word("lean", "lean(?:er|est)?", "packed, small"),
    Word("tally", "tall(?:y|ies)", "counters"),
    Word("payoff", "payoffs?", "draft source selector, benefit"),
    Word("deal", "deals?|dealt|dealings?", "route, assign, distribute"),
    Word("kin", "kin", "shared_with"),
    Word("fleet", "fleets?", "targets"),
    Word("warmth", "warmth", "draft temperature"),
    Word("portion", "portions?", "work item, share"),
    Word("flight", r"(?<!in )flights?", "in flight, pending request"),
    Word("trust", "trust(?:s|ed|ing)?", "lr_scale", ((r"trust remote code", "an option of transformers"),)),
    Word("breathe", "breathes?", "yield_cpu"),
    Word("shelf", "shel(?:f|ves)|shelving", "version source, version folder"),
    Word("taught", "taught|teaching", "teacher batch, soft target, training"),
    Word(
        "figures",
        "figures?",
        "metrics, results, numbers",
        (
            (r"figures?[-: *]+\d+", "of a paper"),
            (r"paper'?s?[-. ](?:tables (?:and|or) )?figures?", "of a paper"),
            (r"figures of the (?:omnidraft )?paper", "of a paper"),
            (r"tables? (?:and|or) figures?", "of a paper"),
            (r"(?:--|draw |by )figure", "of a paper: what the paper calls it"),
        ),
    ),
    Word("watch", "watch(?:es|ed|ing)?", "monitor, detector", ((r"watch -n", "the command"),)),
    Word("notice", "notices?|noticed", "warning, log, detect"),
    Word("patience", "patience", "retry policy, timeout"),
    Word("hire", "hire[sd]?", "add a worker"),
    Word("lives", "lives|lived", "restart budget; is in, runs"),
    Word("rests", "rests|rested|resting", "speculation is paused"),
    Word("room", "rooms?", "remaining tokens; package, folder", ((r"(?:no |make |makes |is )?room for", "space"),)),
    Word("news", "news", "new weights, updates"),
    Word("sheet", "sheets?", "table", ((r"(?:style|data|model) ?sheets?", "of styles, of data"),)),
    Word("pictures", "pictures?", "plots, pages"),
    Word(
        "floor",
        "floors?",
        "baseline",
        (
            (r"(?:acceptance|from) floor|floor (?:folder|version)", "column of the schema"),
            (r"compare (?:\S+ )?floor", "persisted argument of `omnidraft versions compare`"),
            (r"(?<=[\"'`])floor(?=[\"'`])", "persisted reason of a version"),
            (r"(?<=\.)floor(?=\()|floor[ -]divi\w+", "rounding"),
        ),
    ),
    Word("trouble", "troubles?", "last error"),
    Word("claim", "claim(?:s|ed|ing)?", "acquire"),
    Word("push down", "push downs?", "trie teacher"),
    Word("read ahead", "read ahead", "prefetcher, prefetch"),
    Word("learner host", "learner hosts?|host setup", "learner service, learner configuration"),
    Word("drafter learner", "drafter learner", "update scheduler"),
    Word("last answer", "last answer", "error response"),
    Word("draft where paying", "draft where paying", "adaptive speculation"),
)

WORDS = (*HABITS, *PRIVATE)

# Files that may quote words as they were, between the lines `<!-- words: as written -->` and `<!-- words: checked -->`.
AS_WRITTEN = {
    "CHANGELOG.md": "entries of the past are not rewritten",
    "docs/experiments.md": "quotes names as they are stored",
    "docs/glossary.md": "quotes names as they are stored",
}
# Files that are not read at all.
NOT_READ = {
    "tests/support/style_words.py": "the list itself",
    "tests/test_style.py": "samples that must be found",
}
