"""Fixtures of the versions of a tiny pair."""

from published_pair import published  # noqa: F401  (a fixture)
from tiny_pair import tiny_pair  # noqa: F401  (a fixture)
