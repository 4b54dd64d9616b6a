"""vLLM's sources (`make test-vllm-sources` unpacks them): its newest release cannot be imported without a GPU."""

import ast

from engine_sources import EngineSources

SOURCES = EngineSources("vllm", "test-vllm-sources")
ROOT, tree, find, run_alone = SOURCES.root, SOURCES.tree, SOURCES.find, SOURCES.run_alone


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
