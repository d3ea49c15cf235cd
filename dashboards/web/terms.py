"""The terms that the pages use, each explained in a sentence. docs/glossary.md has them all."""

TERMS = {
    "piece": "a token of the drafter's vocabulary",
    "draft": "what one block proposes to the target: pieces of the drafter, or a copied tree",
    "own text": "drafts copied from what followed earlier in the same prompt and its completion",
    "memory": "drafts copied from what followed the same tokens in earlier completions of the target",
    "target forward": "one pass of the large model over a sequence; it verifies a draft and yields one token more",
    "judged": "accepted or rejected by the target; what follows a rejection in the same block is not judged",
    "acceptance head": "the small network that estimates whether a piece will be accepted, which ends drafts in time",
    "baseline": "the drafter as it was loaded, before it learned anything",
    "version": "a saved drafter with its head, n-grams and memory",
    "alias": "a name in MLflow: “champion” is the version that programs should load, “candidate” the newest one",
    "probe": "24 fixed prompts on which every version is measured, so that versions of all runs compare",
    "drift": "a lasting change of the text, found by a detector; by default the acceptance head is then reset and the "
    "memory's counts are halved, so that new text weighs more",
    "recall": "the choice, after a drift, between the drafter in service and other drafters of earlier versions; there "
    "is none to choose from before an update has served",
    "gate": "the check on held-out prompts that decides whether an update of the drafter serves",
    "update": "gradient steps on a copy of the drafter, by default only where enough of its tokens are rejected to "
    "repay them, or one step of the acceptance head",
    "residual": "the token drawn in place of a rejected one",
    "bonus": "the token drawn after a draft of which nothing was rejected",
    "n-gram": "a token of the target that is spelled by two or more pieces, kept in a cache",
    "propensity": "the chance with which a block drew what it did",
    "chance": "the estimated probability that a candidate of a tree is accepted",
    "context": "the last tokens of a text, 8 at most unless set otherwise, by which the memory finds what followed",
}
PAGE_TERMS = {  # in the order in which a page needs them
    "stream": ("draft", "own text", "memory", "target forward", "judged", "acceptance head", "update", "gate",
               "baseline", "version", "drift", "recall"),
    "policies": ("draft", "own text", "memory", "target forward", "propensity"),
    "text": ("piece", "draft", "own text", "memory", "judged", "residual", "bonus", "n-gram",
             "acceptance head"),
    "memory": ("memory", "own text", "context", "chance", "target forward", "drift"),
    "ngrams": ("piece", "n-gram", "draft"),
    "calibration": ("acceptance head", "own text", "memory", "chance", "judged"),
    "vocabulary": ("piece", "n-gram"),
    "versions": ("version", "probe", "baseline", "target forward", "alias", "judged", "update", "acceptance head",
                 "n-gram", "drift", "recall"),
}  # fmt: skip


def list_terms(page: str) -> list[tuple[str, str]]:
    """Return the terms of a page with their explanations."""
    return [(term, TERMS[term]) for term in PAGE_TERMS.get(page, ())]
