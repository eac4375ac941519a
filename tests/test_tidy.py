"""The few hard rules of size and naming. They are tests, because nothing stays small by intent.

Generated stubs and tests are excepted.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protos/tessera", "kv_manager", "model_worker", "gateway", "services", "docs", "deploy", "bench")
"""Where our own Python code lives; a folder that is not there (yet) holds none."""

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 7
JUNK_DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "stuff"}


def sources() -> list[Path]:
    """Every module of ours except generated ones."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "_pb2" not in path.name)


def violations(path: Path, text: str) -> Iterator[str]:
    """What is wrong with one module, for people; `path` only names it."""
    lines = text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{path}: {lines} lines, more than {FILE_LINES_MAX}: split it by question"
    if {path.stem, path.parent.name} & JUNK_DRAWERS:
        yield f"{path}: a junk drawer: name the noun"
    tree = ast.parse(text)
    if ast.get_docstring(tree) is None:
        yield f"{path}: no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function_violations(path, node)


def _function_violations(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    if lines > FUNCTION_LINES_MAX:
        yield f"{path}:{node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"
    parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    counted = [name for name in parameters if name not in ("self", "cls")]
    if len(counted) > PARAMETERS_MAX:
        yield f"{path}:{node.lineno}: {node.name} has {len(counted)} parameters, more than {PARAMETERS_MAX}"


def test_every_module_is_tidy() -> None:
    modules = sources()
    assert len(modules) > 20, "the walk finds the code"
    found = [problem for path in modules for problem in violations(path.relative_to(ROOT), path.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("kv_manager/block.py", '"""Doc."""\n' + "x = 1\n" * 400, "401 lines"),
        ("kv_manager/block.py", "x = 1\n", "no module docstring"),
        ("kv_manager/utils.py", '"""Doc."""\n', "junk drawer"),
        ("services/common/block.py", '"""Doc."""\n', "junk drawer"),
        ("kv_manager/block.py", '"""Doc."""\n\n\ndef f():\n' + "    x = 1\n" * 70, "71 lines"),
        (
            "kv_manager/block.py",
            '"""Doc."""\n\n\nclass C:\n    async def f(self, a, b, c, d, *, e, f, g, h): ...\n',
            "8 parameters",
        ),
    ],
)
def test_a_planted_violation_is_found(name: str, text: str, complaint: str) -> None:
    assert complaint in "\n".join(violations(Path(name), text))


def test_the_largest_tidy_module_is_accepted() -> None:
    function = "class C:\n    def f(self, a, b, c, d, e, f, g):\n" + "        x = 1\n" * 69
    text = '"""Doc."""\n' + function
    text += "x = 1\n" * (FILE_LINES_MAX - text.count("\n"))
    assert list(violations(Path("kv_manager/block.py"), text)) == []
