"""SGLang's sources, read and taken apart: a wheel unpacked in `serving/build/sglang` (`make test-sglang` does that).

`sglang_modules.py` imports what loads on a CPU. Of the rest single functions can be run all the same: `run_alone`
compiles the definitions that a test names and nothing around them, the test gives what they refer to.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "build" / "sglang" / "sglang"


@cache
def tree(file: str) -> ast.Module:
    """The syntax tree of a file, by its path below the package."""
    assert ROOT.is_dir(), f"{ROOT} is not there: `make test-sglang` unpacks it"
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def find(file: str, name: str) -> ast.AST:
    """A function or class, `"name"` or `"Class.method"`. Raises `AssertionError` for one that is gone."""
    node = tree(file)
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [child for child in node.body if isinstance(child, kinds) and child.name == part]
        assert found, f"{file} has no {name} any more: read SGLang anew"
        node = found[-1]
    return node


def methods(file: str, name: str) -> set[str]:
    """What a class defines itself."""
    return {child.name for child in find(file, name).body if isinstance(child, ast.FunctionDef)}


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """The calls of a function or method of that name inside a node, in the order of the file."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func).split(".")[-1] == name]
    return sorted(found, key=lambda call: call.lineno)


def constant(file: str, name: str):
    """The value of a literal that a file assigns at its top."""
    for child in tree(file).body:
        if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == name:
            return ast.literal_eval(child.value)
    raise AssertionError(f"{file} has no {name} any more: read SGLang anew")


def run_alone(file: str, *names: str, **known) -> dict:
    """Compile the named definitions (a method becomes a function) and return them by name. `known` is what they refer
    to; anything else of SGLang is a `NameError` when it is reached."""
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *(find(file, name) for name in names)], []))
    namespace = {"__name__": "builtins", **known}
    exec(compile(module, str(ROOT / file), "exec"), namespace)
    return namespace
