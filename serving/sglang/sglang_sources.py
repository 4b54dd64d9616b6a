"""SGLang's sources (`make test-sglang` unpacks them); `sglang_modules.py` imports what of it loads on a CPU."""

import ast

from engine_sources import EngineSources

SOURCES = EngineSources("sglang", "test-sglang")
ROOT, tree, find, run_alone = SOURCES.root, SOURCES.tree, SOURCES.find, SOURCES.run_alone


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
