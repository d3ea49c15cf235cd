"""Paths: the root of the repository; some tests read data that is next to it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
