"""The arrows of docs/architecture.md, read from its table and held against every import of both packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = {"micsctl": REPOSITORY / "micsctl", "mics": REPOSITORY / "trainer" / "mics"}

PURE_MICS = {
    "mics.shapes",
    "mics.topology",
    "mics.strategies",
    "mics.traffic",
    "mics.config",
    "mics.entries",
    "mics.probes",
}
VALUES = re.compile(r"micsctl\.(\w+\.model|aws\.settings)")
SINGLE_FILES = {"errors", "duration", "home", "spec", "resources"}
DOES_IO = {
    *("asyncio", "ctypes", "glob", "http", "importlib", "io", "logging", "multiprocessing", "os", "pathlib", "random"),
    *("select", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time"),
    *("urllib", "uuid", "pkgutil", "datetime"),
}


@dataclass(frozen=True)
class Import:
    source: str  # the importing module
    target: str  # the imported module, or a name in it
    types_only: bool  # under `if TYPE_CHECKING:`

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    def __str__(self) -> str:
        return f"{self.source} imports {self.target}"


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def room(module: str) -> str:
    """`planner` of `micsctl.planner.plan`."""
    return module.split(".")[1] if "." in module else ""


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of both packages, parsed."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            name = ".".join(parts).removesuffix(".__init__")
            found[name] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, tree in sources().items() for found in _imports(name, tree))


def _imports(name: str, tree: ast.Module) -> Iterator[Import]:
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, id(node) in guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            yield from (Import(name, f"{node.module}.{alias.name}", id(node) in guarded) for alias in node.names)


def documented_arrows() -> dict[str, set[str]]:
    """From room to the rooms that the third column of the table lets it touch."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `micsctl/(\w+)(?:\.py)?` \| .* \| (.*) \|$", text, re.M)
    arrows = {name: set(re.findall(r"(?<![`.\w])\w+(?![`.\w])", touch)) - {"nothing"} for name, touch in rows}
    everything = {name for name in arrows if name != "cli"}
    return {name: everything if name == "cli" else touch & everything for name, touch in arrows.items()}


def test_the_table_names_every_room() -> None:
    rooms = {room(name) for name in sources() if inside(name, "micsctl")} - {"", "__main__"}
    assert set(documented_arrows()) == rooms


def test_rooms_touch_what_the_table_says() -> None:
    arrows = documented_arrows()
    assert arrows["cluster"] == {"aws", "remote"}  # the table is read as it is meant
    wrong = [
        str(found)
        for found in imports()
        if inside(found.source, "micsctl") and inside(found.target, "micsctl") and not found.types_only
        if (here := room(found.source)) not in ("", "__main__") and (there := room(found.target)) != here
        if there not in arrows[here] and there != "__version__" and not _is_common(here, found.target)
    ]
    assert wrong == []


def _is_common(here: str, target: str) -> bool:
    """Values and single files, which every folder may use; a single file goes by its own row."""
    return here not in SINGLE_FILES and (VALUES.match(target) is not None or room(target) in SINGLE_FILES)


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("boto3", {"aws"}),
        ("botocore", {"aws", "sandbox"}),  # the sandbox answers in botocore's own models
        ("fabric", {"remote"}),
        ("invoke", {"remote"}),
        ("paramiko", {"remote"}),
        ("moto", {"sandbox"}),
        ("werkzeug", {"sandbox"}),
        ("typer", {"cli"}),
        ("rich", {"cli"}),
        ("matplotlib", {"report"}),
        ("torch", set()),
        ("numpy", set()),
    ],
)
def test_a_library_stays_in_its_room(library: str, rooms: set[str]) -> None:
    wrong = [
        str(found)
        for found in imports()
        if inside(found.source, "micsctl") and found.top == library and room(found.source) not in rooms
    ]
    assert wrong == []


def test_only_one_file_imports_by_name() -> None:
    """moto, whose models are annotated too loosely to be checked; what an import by name fetches, no table sees."""
    users = {
        name
        for name, tree in sources().items()
        for call in _calls(tree)
        if inside(name, "micsctl") and ast.unparse(call.func).endswith(("import_module", "__import__"))
    }
    assert users == {"micsctl.sandbox.ec2.moto_parts"}


def test_only_the_command_line_knows_the_sandbox() -> None:
    users = {room(found.source) for found in imports() if inside(found.target, "micsctl.sandbox")}
    assert users <= {"cli", "sandbox"}


def test_micsctl_imports_only_the_pure_modules_of_the_trainer() -> None:
    wrong = [
        str(found)
        for found in imports()
        if inside(found.source, "micsctl") and found.top == "mics"
        if not any(inside(found.target, pure) for pure in PURE_MICS) and found.source != "micsctl.resources"
    ]
    assert wrong == []


EXTRAS = {
    "boto3": {"mics.storage"},
    "botocore": {"mics.storage"},
    "smart_open": {"mics.storage"},
    "transformers": {"mics.models.huggingface"},
    "safetensors": {"mics.models.weights", "mics.models.convert"},
    "tokenizers": {"mics.data.tokenizer"},
}


def test_the_trainer_never_imports_micsctl_and_keeps_each_extra_in_its_place() -> None:
    needed = {"mics", "torch", "numpy", *sys.stdlib_module_names}
    wrong = [
        str(found)
        for found in imports()
        if inside(found.source, "mics") and found.top not in needed and found.source not in EXTRAS.get(found.top, set())
    ]
    assert wrong == []


def test_training_loads_no_extra() -> None:
    extras = {*EXTRAS, "tensorboard"}
    code = f"import sys, mics.train; print(sorted({extras} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_pure_modules_use_the_standard_library_and_each_other() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.source in PURE_MICS and found.top not in sys.stdlib_module_names
        if not any(inside(found.target, pure) for pure in PURE_MICS)
    ]
    assert wrong == []


def test_the_planner_is_pure() -> None:
    wrong = [str(found) for found in imports() if inside(found.source, "micsctl.planner") and found.top in DOES_IO]
    assert wrong == []
    calls = {"open", "print", "input", "eval", "exec", "__import__"}
    for name, tree in sources().items():
        if inside(name, "micsctl.planner"):
            assert calls.isdisjoint(call.func.id for call in _calls(tree) if isinstance(call.func, ast.Name)), name


def test_private_torch_stays_in_the_engine() -> None:
    private = re.compile(r"torch(\.\w+)*\._\w+")
    users = {found.source for found in imports() if private.match(found.target)}
    assert users <= {"mics.collectives", "mics.sharding"}


def test_only_render_prints() -> None:
    """The processes of the sandbox may write their own log, and only to a stream that they name."""
    wrong = [
        f"{name}:{call.lineno}"
        for name, tree in sources().items()
        if inside(name, "micsctl") and name != "micsctl.cli.render"
        for call in _calls(tree)
        if isinstance(call.func, ast.Name) and call.func.id == "print"
        if room(name) != "sandbox" or "file" not in {keyword.arg for keyword in call.keywords}
    ]
    assert wrong == []


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_importing_mics_or_the_planner_loads_no_torch() -> None:
    code = (
        "import sys, mics, mics.config, mics.traffic, micsctl.planner.plan, micsctl.planner.machines;"
        "heavy = {'torch', 'numpy', 'boto3', 'fabric', 'paramiko', 'moto', 'pydantic', 'ruamel'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_names_a_machine_of_its_developers() -> None:
    home = re.compile(r"(?<![\w$}/.])/(?:work|root|Users)/\w|(?<![\w$}/.])/home/(?!ubuntu\b|ec2-user\b|\$|\{)\w")
    wrong = []
    for file in _repository_files():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        if file.is_relative_to(REPOSITORY / "tests" / "sandbox"):
            continue  # speaks of paths on hosts of its own
        wrong += [f"{file.relative_to(REPOSITORY)}:{i}: {line}" for i, line in enumerate(lines, 1) if home.search(line)]
    assert wrong == []


def _repository_files() -> list[Path]:
    """Files of the checkout, without what git ignores; in an unpacked source archive, the folders that it ships."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if listed.returncode == 0:
        found = [REPOSITORY / name for name in listed.stdout.decode().split("\0") if name]
    else:
        found = [
            file
            for folder in ("micsctl", "trainer", "templates", "docs")
            for file in REPOSITORY.joinpath(folder).rglob("*")
        ]
    return [file for file in found if file.is_file()]
