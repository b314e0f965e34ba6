"""The architecture as a test: who may import whom, one home for heavy libraries, sizes of files and functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES, FUNCTION_LINES = 400, 60

# Room -> the rooms it may import. A room may always import itself.
FLOOR = {"types", "roles", "fingerprint", "onednn", "cores", "config"}
MAY_IMPORT = {
    "types": set(),
    "roles": {"types"},
    "fingerprint": set(),
    "onednn": set(),
    "cores": set(),
    "config": set(),
    "algorithms": FLOOR,
    "data": FLOOR,
    "envs": FLOOR,
    "plane": FLOOR,
    "rollout": FLOOR,
    "weights": FLOOR,
    "metrics": FLOOR,
    "train": FLOOR | {"algorithms"},
    "control": FLOOR | {"algorithms", "metrics"},
    "testing": FLOOR | {"algorithms", "envs"},
    "simulation": FLOOR | {"control", "metrics", "plane"},
    "report": {"control", "plane"},
    "launch": FLOOR
    | {"algorithms", "control", "data", "envs", "metrics", "plane", "report", "rollout", "simulation"}
    | {"train", "weights"},
    "cli": {"launch", "config"},
    "__main__": {"cli"},
    "__init__": set(),
}
# A heavy library -> the only places that may import it.
HOMES: dict[str, str | tuple[str, ...]] = {
    "ray": ("launch/ray/", "plane/ray_processes.py"),  # places workers; keeps a plane's processes
    "vllm": "rollout/vllm/",
    "megatron": "train/megatron/",
    "transfer_queue": "plane/transfer_queue.py",
    "wandb": "metrics/wandb.py",
    "mlflow": "metrics/mlflow.py",
    "datasets": "data/hub.py",
    "pyarrow": "data/parquet.py",
    "math_verify": "envs/worker.py",  # in processes of its own only
    # Its problems are prompts; its scorers run in processes of their own.
    "reasoning_gym": ("data/reasoning_gym.py", "envs/worker.py"),
    "httpx2": "envs/llm_judge.py",
    "matplotlib": "report/charts.py",
}


def room_of(module_path: Path, package: Path) -> str:
    """`control` for control/buffer.py, `types` for types.py."""
    return module_path.relative_to(package).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> list[tuple[int, str]]:
    """Every absolute import of a module, with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
            if node.module == "tandem":
                found += [(node.lineno, f"tandem.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, "<relative>"))
    return found


def violations(package: Path) -> list[str]:
    """Everything in the package that breaks a rule of the house."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        where = path.relative_to(package).as_posix()
        found += [f"{where}:{line}: {what}" for line, what in broken_imports(tree, where, room_of(path, package))]
        found += [f"{where}:{line}: {what}" for line, what in oversized(tree, text)]
    return found


def broken_imports(tree: ast.AST, where: str, room: str) -> list[tuple[int, str]]:
    found = []
    for line, module in imports_of(tree):
        top, *rest = module.split(".")
        if top == "<relative>":
            found.append((line, "relative import: write the room's name"))
        elif top == "tandem" and rest and rest[0] not in MAY_IMPORT.get(room, set()) | {room, "__version__"}:
            found.append((line, f"{room} may not import {rest[0]}"))
        elif top in HOMES and not where.startswith(HOMES[top]):
            found.append((line, f"{top} has its home in {HOMES[top]}"))
        elif top == "torch" and room == "config":
            found.append((line, "config is free of torch"))
        elif room == "control" and top in {"ray", "vllm", "transformers"}:
            found.append((line, f"control is free of {top}"))
    return found


def oversized(tree: ast.AST, text: str) -> list[tuple[int, str]]:
    found = []
    if (lines := text.count("\n")) > FILE_LINES:
        found.append((lines, f"file of {lines} lines, {FILE_LINES} allowed"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append((node.lineno, f"{node.name} has {length} lines, {FUNCTION_LINES} allowed"))
    return found


def test_the_house_keeps_its_rules():
    assert violations(ROOT / "tandem") == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "scripts"])
def test_files_and_functions_elsewhere_are_small_too(folder: str):
    sizes = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        sizes += [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in oversized(ast.parse(text), text)]
    assert sizes == []


def test_every_room_is_in_the_table():
    rooms = {room_of(path, ROOT / "tandem") for path in (ROOT / "tandem").rglob("*.py")}
    assert rooms <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("place", "code", "complaint"),
    [
        ("control/loop.py", "import tandem.launch.local\n", "control may not import launch"),
        ("control/loop.py", "from tandem import launch\n", "control may not import launch"),
        ("plane/memory.py", "from ..rollout import groups\n", "relative import"),
        ("plane/memory.py", "def f():\n    import ray\n", "ray has its home"),
        ("config/run.py", "import torch\n", "config is free of torch"),
        ("data/long.py", "x = 1\n" * 401, "file of 401 lines"),
        ("data/long.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, place: str, code: str, complaint: str):
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_text(code)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]
