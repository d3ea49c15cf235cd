"""How the commands of this package report errors."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from store.errors import OmnidraftError, UsageError


def run_command(parser: ArgumentParser, work: Callable[[Namespace], object], misuse: int = 1) -> None:
    """Run a command with its arguments. Errors are printed in one line; the exit status is 1, or `misuse` for a
    `UsageError`.
    """
    arguments = parser.parse_args()
    try:
        work(arguments)
    except (OmnidraftError, OSError) as error:
        print(f"omnidraft: {error}", file=sys.stderr)
        sys.exit(misuse if isinstance(error, UsageError) else 1)
