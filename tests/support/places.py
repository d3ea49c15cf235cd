"""Where things lie: the repository, and beside it the data that some tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
