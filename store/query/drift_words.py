"""What a drift of the signal `frequency` means in words, for the progress and the pages."""

from math import exp


def describe_rarity(before: float, after: float) -> str:
    """Describe a change of the mean logarithm of how often tokens occurred in earlier completions.

    >>> describe_rarity(-6.0, -7.0), describe_rarity(-7.0, -6.5)
    ('2.7 times as rare as before', '1.6 times as common as before')

    Args:
        before, after: natural logarithms.
    """
    return f"{exp(abs(after - before)):.1f} times as {'rare' if after < before else 'common'} as before"
