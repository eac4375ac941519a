"""Write down what a checkout of AITER declares of the functions that we call: `python -m tests.aiter.snapshot CHECKOUT`.

The published wheel is older than AITER's head by months, and the head cannot be installed without ROCm. So the head's declarations are kept
in `signatures/head.json`, made from its source; `test_signatures` holds every call against them. CHECKOUT is a clone of github.com/ROCm/aiter. To be run again
when a call is added, or when AITER has moved.
"""

import json
import subprocess
import sys
from inspect import Parameter
from pathlib import Path
from typing import Any

from model_worker.kernels.aiter.native_calls import NativeCalls
from model_worker.kernels.aiter.triton_calls import TritonCalls
from tests.aiter import example_calls
from tests.aiter.declarations import AiterSource, Declaration, Undeclared
from tests.aiter.declared_library import DeclaredLibrary

HEAD = Path(__file__).parent / "signatures" / "head.json"


def main(checkout: Path) -> None:
    library = DeclaredLibrary("gfx942", AiterSource(checkout).declaration)
    for example in example_calls.TRITON.values():
        example(TritonCalls(library))
    for example in example_calls.NATIVE.values():
        example(NativeCalls(library))
    source = AiterSource(checkout)
    functions = {f"{module}:{name}": _as_json(source.declaration(module, name)) for module, name in sorted(library.asked)}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(function)}" for key, function in functions.items())
    HEAD.write_text(f'{{"commit": "{_commit(checkout)}",\n"functions": {{\n{lines}\n}}}}\n')


def declared_at_head(module: str, name: str) -> Declaration:
    """From the snapshot. Raises Undeclared for what is not in it."""
    found = json.loads(HEAD.read_text())["functions"].get(f"{module}:{name}")
    if found is None:
        raise Undeclared(f"{module}.{name} is not in {HEAD.name}: see {__name__}")
    return Declaration(found["file"], found["is_compiled"], tuple(_parameter(**each) for each in found["parameters"]))


def _as_json(declaration: Declaration) -> dict[str, Any]:
    parameters = [
        {"name": p.name, "kind": p.kind.name}
        | ({} if p.default is Parameter.empty else {"default": p.default})
        | ({} if p.annotation is Parameter.empty else {"annotation": p.annotation})
        for p in declaration.parameters
    ]
    return {"file": declaration.file, "is_compiled": declaration.is_compiled, "parameters": parameters}


def _parameter(name: str, kind: str, default: object = Parameter.empty, annotation: object = Parameter.empty) -> Parameter:
    return Parameter(name, getattr(Parameter, kind), default=default, annotation=annotation)


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%H %cs"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
