"""Commands whose help shows no type for options without a value, where typer shows `<bool>`."""

from typing import Any

from typer.core import TyperCommand, TyperGroup
from typing_extensions import override


class PlainCommand(TyperCommand):
    """A command whose help shows no type for options without a value."""

    @override
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """Commands whose help shows no type for options without a value."""

    @override
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(params: list[Any]) -> list[Any]:
    for one in params:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return params
