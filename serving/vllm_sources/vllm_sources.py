"""vLLM's sources, read and taken apart: a wheel unpacked in `serving/build/vllm` (`make test-vllm-sources` does that).

The newest vLLM is for GPUs, and cannot be imported here. Single functions can be run all the same: `run_alone`
compiles the definitions that a test names and nothing around them, the test gives what they refer to.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "build" / "vllm" / "vllm"


@cache
def tree(file: str) -> ast.Module:
    """The syntax tree of a file, by its path below the package."""
    assert ROOT.is_dir(), f"{ROOT} is not there: `make test-vllm-sources` unpacks it"
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def find(file: str, name: str) -> ast.AST:
    """A function or class, `"name"` or `"Class.method"`. Raises `AssertionError` for one that is gone."""
    node = tree(file)
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [child for child in node.body if isinstance(child, kinds) and child.name == part]
        assert found, f"{file} has no {name} any more: read vLLM anew"
        node = found[-1]
    return node


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of its parameters, in order."""
    return [arg.arg for arg in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]


def fields(file: str, name: str) -> dict[str, str]:
    """What a class declares with a type, and properties: the value's source, where there is one."""
    found = {}
    for node in find(file, name).body:
        if isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = "" if node.value is None else ast.unparse(node.value)
        elif isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in node.decorator_list):
            found[node.name] = "property"
    return found


def lines_of(node: ast.AST, source: str) -> list[int]:
    """Where a statement or expression that reads like this stands in a node."""
    kinds = (ast.stmt, ast.expr)
    return [n.lineno for n in ast.walk(node) if isinstance(n, kinds) and ast.unparse(n) == source]


def run_alone(file: str, *names: str, **known) -> dict:
    """Compile the named definitions (a method becomes a function, without decorators) and return them by name.
    `known` is what they refer to; anything else of vLLM is a `NameError` when it is reached."""
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    found = [find(file, name) for name in names]
    for node in found:
        node.decorator_list = []
    module = ast.fix_missing_locations(ast.Module([future, *found], []))
    namespace = {"__name__": "builtins", **known}
    exec(compile(module, str(ROOT / file), "exec"), namespace)
    return namespace
