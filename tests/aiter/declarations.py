"""What functions of AITER declare, read from its source without importing it: so of any version, and of functions that are compiled."""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

_OLD_NAMES = "_BACKWARD_COMPAT_MAP"
"""Where `aiter.ops.triton` says what became of its modules' old names."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A function of AITER. `is_compiled`: its body is C++, and calls reach it through an operator of torch, which hides its parameters."""

    file: str
    is_compiled: bool
    parameters: tuple[Parameter, ...]

    @property
    def signature(self) -> Signature:
        return Signature(self.parameters)


_Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


class Undeclared(Exception):
    """This AITER has no such function."""


@dataclass(frozen=True, slots=True)
class AiterSource:
    """The source of one version: `root` is the folder that holds `aiter/`."""

    root: Path
    _trees: dict[Path, ast.Module] = field(default_factory=dict)

    def declaration(self, module: str, name: str) -> Declaration:
        """Of what `getattr(import_module(module), name)` would be; a name with a dot is a method of an object. Raises Undeclared."""
        name, _, method = name.partition(".")
        found = self._find(self._file(module), name, set())
        while found is not None and isinstance(found[1], ast.Assign):  # an object that a class makes, or another name
            value = found[1].value.func if isinstance(found[1].value, ast.Call) else found[1].value
            found = self._find(found[0], value.id, set()) if isinstance(value, ast.Name) else None
        if found is None:
            raise Undeclared(f"no function {module}.{name}")
        file, node = found
        if isinstance(node, ast.FunctionDef):
            return self._declared(file, node)
        methods = {statement.name: statement for statement in node.body if isinstance(statement, ast.FunctionDef)}
        if method not in methods:
            raise Undeclared(f"no method {module}.{name}.{method}")
        return self._declared(file, methods[method], skip=1)

    def _declared(self, file: Path, function: ast.FunctionDef, skip: int = 0) -> Declaration:
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        is_compiled = any("compile_ops(" in decorator for decorator in decorators)
        return Declaration(str(file.relative_to(self.root)), is_compiled, _parameters(function.args)[skip:])

    def _find(self, file: Path | None, name: str, seen: set[Path]) -> tuple[Path, _Definition] | None:
        """Where a name that a file has is defined: there, or where the file imports it from. The last definition counts."""
        if file is None or file in seen:
            return None
        seen.add(file)
        for statement in reversed(list(_statements(self._tree(file).body))):
            if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
                return file, statement
            if isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in statement.targets):
                return file, statement
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if name == (alias.asname or alias.name) or alias.name == "*":
                        source = self._file(self._imported(file, statement))
                        found = self._find(source, name if alias.name == "*" else alias.name, seen)
                        if found is not None:
                            return found
        return None

    def _imported(self, file: Path, statement: ast.ImportFrom) -> str:
        """The module that a `from ... import` in a file names."""
        if statement.level == 0:
            return statement.module or ""
        package = file.relative_to(self.root).parts[: -statement.level]
        return ".".join([*package, *([statement.module] if statement.module else [])])

    def _file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
        package, _, last = module.rpartition(".")
        if package == "aiter.ops.triton" and last in (renamed := self._renamed()):
            return self._file(f"{package}.{renamed[last]}")
        return None

    def _renamed(self) -> dict[str, str]:
        for statement in self._tree(self.root / "aiter/ops/triton/__init__.py").body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == _OLD_NAMES:
                renamed: dict[str, str] = ast.literal_eval(statement.value)
                return renamed
        return {}

    def _tree(self, file: Path) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(file.read_text())
        return self._trees[file]


def published() -> AiterSource:
    """The AITER that is installed here; it is not imported."""
    spec = importlib.util.find_spec("aiter")
    assert spec is not None and spec.origin is not None, "only in the environment of `make test-aiter`"
    return AiterSource(Path(spec.origin).parent.parent)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is imported, also in branches."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements([*statement.body, *statement.orelse])
        if isinstance(statement, ast.Try):
            yield from _statements([*statement.finalbody, *(inner for handler in statement.handlers for inner in handler.body)])


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...]:
    by_position = [
        *((a, Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs),
        *((a, Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args),
    ]
    defaults = [None] * (len(by_position) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_parameter(argument, kind, default) for (argument, kind), default in zip(by_position, defaults, strict=True)]
    if arguments.vararg is not None:
        found.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument, Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        found.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD, None))
    return tuple(found)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> Parameter:
    return Parameter(
        argument.arg,
        kind,
        default=Parameter.empty if default is None else ast.unparse(default),
        annotation=Parameter.empty if argument.annotation is None else ast.unparse(argument.annotation),
    )
