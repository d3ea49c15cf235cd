"""Drafts in target tokens: from the sequence's own text, and from everything that the target emitted before."""
