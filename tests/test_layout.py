"""The layout of the project, from its syntax trees: permitted imports, and limits of lengths."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dashboards", "pipeline", "stages", "store")
MODULES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))

# Modules of the project that each package may import, in addition to its own.
MAY_IMPORT = {
    "store": (),
    "stages": ("store.events", "store.errors", "store.child", "store.noise"),
    "pipeline": ("stages", "store"),
    "dashboards": ("store",),
}
# The folders of each package in layers, low to high. A folder may import those of lower layers of its package, and
# itself; so no two folders import each other in a circle.
LAYERS = {
    "store": (
        ("store",),
        ("store/log",),
        ("store/query",),
        ("store/registry",),
        ("store/object_store",),
    ),
    "stages": (
        ("stages/engine/quantisation",),
        ("stages/vocabulary", "stages/engine/checkpoints"),
        ("stages/engine/compiled/llvm",),
        ("stages/engine/compiled/lines",),
        ("stages/sampling",),
        ("stages/ngrams",),
        ("stages/contract", "stages/engine/forward_pass"),
        ("stages/engine/compiled",),
        ("stages/engine/models",),
        ("stages/drafting", "stages/learn/examples", "stages/prompts"),
        ("stages/verification",),
        ("stages/memory", "stages/learn/training"),
        ("stages",),
    ),
    "pipeline": (
        ("pipeline/config",),
        ("pipeline/sources",),
        ("pipeline",),
        ("pipeline/learning", "pipeline/models"),
        ("pipeline/assembly",),
        ("pipeline/reports",),
        ("pipeline/run",),
        ("pipeline/learner_service",),
        ("pipeline/cluster", "pipeline/serve", "pipeline/training", "pipeline/versions", "pipeline/vllm_plugin"),
        ("pipeline/serve/http", "pipeline/interface"),
        ("pipeline/bench",),
        ("pipeline/cli",),
    ),
    "dashboards": (("dashboards/web/queries",), ("dashboards/web",), ("dashboards",)),
}
RANKS = {folder: rank for layers in LAYERS.values() for rank, layer in enumerate(layers) for folder in layer}
MOST_MODULES = 16  # in one folder

# Files that may import each heavy library at module level.
MODULE_IMPORTERS = {
    "torch": ("stages/*", "pipeline/vllm_plugin/speculator.py"),
    "transformers": (
        "stages/engine/checkpoints/gguf_*.py",
        "stages/engine/forward_pass/attention_masks.py",
        "stages/engine/models/huggingface.py",
        "stages/engine/models/load_errors.py",
        "stages/engine/forward_pass/module_forward.py",
        "stages/engine/forward_pass/row_forward.py",
    ),
    "pyarrow": ("store/*",),
    "obstore": ("store/object_store/mirror.py",),
    "duckdb": ("store/query/log_reader.py",),
    "mlflow": (),
    "peft": (),
    "river": (),
    "scipy": (),
    "datasets": (),
    "ray": ("pipeline/cluster/ray_backend.py",),
    "confluent_kafka": (),
    "gguf": (),
    "llguidance": (),
    "fastapi": ("dashboards/web/app.py", "pipeline/serve/http/*"),
    "starlette": ("dashboards/web/app.py", "pipeline/serve/http/*"),
    "uvicorn": ("pipeline/serve/http/server.py",),
    "prometheus_client": (
        "pipeline/event_metrics.py",
        "pipeline/vllm_plugin/engine.py",
        "pipeline/serve/http/metrics.py",
    ),
    "plotly": (),
    "vllm": (),
}
# Files that may import it inside functions only.
FUNCTION_IMPORTERS = {
    "river": ("pipeline/learning/drift.py",),
    "transformers": ("stages/vocabulary/template_process.py",),
    "pyarrow": (
        "pipeline/sources/files.py",
        "pipeline/sources/hub_and_ray.py",
    ),
    "mlflow": ("store/registry/mlflow_*.py",),
    "scipy": ("stages/drafting/tracked_costs.py", "store/query/rates.py"),
    "peft": ("stages/engine/models/adapters.py",),
    "datasets": ("pipeline/sources/hub_and_ray.py",),
    "ray": ("pipeline/sources/hub_and_ray.py",),
    "confluent_kafka": ("pipeline/sources/kafka.py",),
    "gguf": ("stages/engine/checkpoints/gguf_*.py", "stages/engine/quantisation/stored.py"),
    "llguidance": ("stages/sampling/grammars.py",),
    "uvicorn": ("dashboards/serve.py",),
    "vllm": ("pipeline/vllm_plugin/host.py", "pipeline/vllm_plugin/register.py", "pipeline/vllm_plugin/speculator.py"),
}
LAZY = "pipeline/__init__.py"  # `import pipeline` for users
FILE_LINES, FUNCTION_LINES = 500, 60  # without docstrings; a few files may be longer, no function may


@cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`, which never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module that the code below a node imports when it runs, and whether inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            yield str(child.module), inside
            yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names if child.module in PACKAGES)
        elif not is_for_types(child):
            yield from imports(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def imports_of(path: str) -> tuple[tuple[str, bool], ...]:
    return tuple(imports(tree_of(path)))


def is_below(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def functions_of(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_permitted_packages(package: str):
    ours = {
        (path, name)
        for path in MODULES
        if path.startswith(f"{package}/")
        for name, _ in imports_of(path)
        if is_below(name, *PACKAGES, "benchmarks", "tests") and name not in PACKAGES
    }
    assert {(path, name) for path, name in ours if not is_below(name, package, *MAY_IMPORT[package])} == set()


def test_the_events_import_nothing_but_the_standard_library():
    assert {name.split(".")[0] for name, _ in imports_of("store/events.py")} <= sys.stdlib_module_names
    assert {name.split(".")[0] for name, _ in imports_of("store/errors.py")} <= sys.stdlib_module_names


@pytest.mark.parametrize("library", MODULE_IMPORTERS)
def test_a_heavy_library_is_imported_only_where_permitted(library: str):
    found = {(path, inside) for path in MODULES for name, inside in imports_of(path) if is_below(name, library)}
    strays = {path for path, inside in found if not inside and not matches(path, MODULE_IMPORTERS[library])}
    assert strays == set(), "imported at module level"
    permitted = (*MODULE_IMPORTERS[library], *FUNCTION_IMPORTERS.get(library, ()))
    assert {path for path, _ in found if not matches(path, permitted)} == set()


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def folders_imported_by(path: str) -> set[str]:
    """Other folders of its package from which a module imports."""
    package, known = path.split("/", maxsplit=1)[0], set(MODULES)
    found = {f"{name.replace('.', '/')}.py" for name, _ in imports_of(path) if is_below(name, package)}
    return {folder_of(other) for other in found & known} - {folder_of(path)}


def test_every_folder_is_in_the_table_of_layers():
    modules = {path for path in MODULES if not path.endswith("__init__.py")}
    assert {folder_of(path) for path in modules} == set(RANKS)


def test_folders_import_lower_layers_only():
    found = {(path, folder) for path in MODULES for folder in folders_imported_by(path)}
    assert {(path, folder) for path, folder in found if RANKS[folder] >= RANKS.get(folder_of(path), -1)} == set()


def test_a_folder_has_few_modules():
    sizes = Counter(folder_of(path) for path in MODULES if not path.endswith("__init__.py"))
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def code_lines(path: str) -> int:
    """Number of lines of a module without its docstrings, which have no limit."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, documented) and ast.get_docstring(node)]
    docstrings = sum((node.body[0].end_lineno or 0) - node.body[0].lineno + 1 for node in nodes)
    return len((ROOT / path).read_text(encoding="utf-8").splitlines()) - docstrings


def test_few_files_are_long():
    lengths = [code_lines(path) for path in MODULES]
    assert sum(length > FILE_LINES for length in lengths) <= len(MODULES) // 20
    assert max(lengths) <= 1.5 * FILE_LINES


def test_contributing_has_a_line_for_every_folder():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [folder for folder in RANKS if f"{folder}/" not in text] == []


def test_functions_are_short():
    functions = {(path, node.name): node for path in MODULES for node in functions_of(path)}
    lines = {place: (node.end_lineno or node.lineno) - node.lineno + 1 for place, node in functions.items()}
    assert {place: length for place, length in lines.items() if length > FUNCTION_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_s_init_runs_nothing(package: str):
    allowed = ast.Import | ast.ImportFrom | ast.Expr
    inits = [path for path in MODULES if path.startswith(f"{package}/") and path.endswith("__init__.py")]
    inits = [path for path in inits if path != LAZY]
    assert all(isinstance(node, allowed) for path in inits for node in tree_of(path).body)


def test_the_wheel_holds_the_packages_with_their_types_and_nothing_else():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert sorted(setup["packages"]["find"]["include"]) == [f"{package}*" for package in PACKAGES]
    assert {package for package in PACKAGES if "py.typed" in setup["package-data"][package]} == set(PACKAGES)
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []
    others = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name.startswith(PACKAGES)}
    assert others == set(PACKAGES)


def test_test_files_have_unique_names():
    names = [Path(path).name for path in TESTS if not path.endswith("conftest.py")]  # pytest tells these apart
    assert {name for name in names if names.count(name) > 1} == set()


def modules_after(program: str) -> set[str]:
    """The top-level modules that a new Python process has loaded after it runs a program."""
    report = "\nimport sys; print('LOADED', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program + report], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_the_store_is_read_without_torch_and_mlflow():
    modules = [path.removesuffix(".py").replace("/", ".") for path in MODULES if path.startswith("store/")]
    loaded = modules_after("\n".join(f"import {module}" for module in modules))
    assert {"store", "pyarrow", "duckdb"} <= loaded
    assert loaded & {"torch", "transformers", "peft", "mlflow", "river", "stages", "pipeline"} == set()


def test_the_bare_store_loads_nothing_heavy():
    loaded = modules_after("import store, store.events, store.errors, store.registry.registry")
    assert loaded & {"torch", "mlflow", "pyarrow", "duckdb", "numpy"} == set()


@pytest.mark.parametrize("arguments", [["--help"], ["replay", "--help"], ["sql", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]):
    program = f"""
from pipeline.cli.app import main
import sys
sys.argv = ["omnidraft", *{arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code, end
"""
    loaded = modules_after(program)
    assert {"pipeline", "typer"} <= loaded
    heavy = {"torch", "transformers", "peft", "mlflow", "pyarrow", "duckdb", "river", "numpy", "stages"}
    assert loaded & heavy == set()
