"""The statements in `store/sql/`: recipes for people, and with a leading underscore those of the store itself."""

from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named query that is shipped with the package."""

    name: str
    description: str  # one line
    sql: str


def recipes() -> dict[str, Recipe]:
    """All recipes by name, in alphabetical order."""
    names = sorted(file.name.removesuffix(".sql") for file in files("store").joinpath("sql").iterdir())
    return {name: _recipe(name) for name in names if not name.startswith("_")}


def statement(name: str) -> str:
    """The text of `store/sql/NAME.sql`; names with a leading underscore are parts of the store, not recipes."""
    return files("store").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def _recipe(name: str) -> Recipe:
    sql = statement(name)
    return Recipe(name, sql.splitlines()[0].removeprefix("--").strip(), sql)
