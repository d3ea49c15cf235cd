"""The versions of vLLM that the plugin is made for. Nothing here loads vLLM."""

import re

from store.errors import UsageError

FIRST, AFTER = (0, 32), (0, 34)  # from the first version on, before the second one


def is_supported(version: str) -> bool:
    """Return whether the plugin was made for this version."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and FIRST <= (int(numbers[1]), int(numbers[2])) < AFTER


def check_version(version: str) -> None:
    """Refuse a version that the plugin was not made for: any version may change the interface of drafters.

    >>> check_version("0.32.0+cpu")
    >>> check_version("0.34")
    Traceback (most recent call last):
    store.errors.UsageError: The plugin is made for vLLM 0.32 up to, not including, 0.34; got 0.34: install another.
    """
    if not is_supported(version):
        first, after = ("{}.{}".format(*one) for one in (FIRST, AFTER))
        raise UsageError(
            f"The plugin is made for vLLM {first} up to, not including, {after}; got {version}: install another."
        )
