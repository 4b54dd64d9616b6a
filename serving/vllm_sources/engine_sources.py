"""An engine's sources, read and taken apart: a wheel unpacked in `serving/build/ENGINE`, never installed.

Much of an engine cannot be imported without a GPU. Single functions can be run all the same: `run_alone` compiles the
definitions that a test names and nothing around them, the test gives what they refer to.
"""

import ast
from functools import cache
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build"


class EngineSources:
    """The sources of one engine.

    Args:
        package: the engine's, which is also the name of its folder in `serving/build`.
        target: the target of `make` that unpacks it.
    """

    def __init__(self, package: str, target: str):
        self.root, self.package, self.target = BUILD / package / package, package, target
        self.tree = cache(self._tree)

    def _tree(self, file: str) -> ast.Module:
        """The syntax tree of a file, by its path below the package."""
        assert self.root.is_dir(), f"{self.root} is not there: `make {self.target}` unpacks it"
        return ast.parse((self.root / file).read_text(encoding="utf-8"))

    def find(self, file: str, name: str) -> ast.AST:
        """A function or class, `"name"` or `"Class.method"`. Raises `AssertionError` for one that is gone."""
        node = self.tree(file)
        for part in name.split("."):
            kinds = (ast.ClassDef, ast.FunctionDef)
            found = [child for child in node.body if isinstance(child, kinds) and child.name == part]
            assert found, f"{file} has no {name} any more: read {self.package} anew"
            node = found[-1]
        return node

    def run_alone(self, file: str, *names: str, **known) -> dict:
        """Compile the named definitions (a method becomes a function, without decorators) and return them by name.
        `known` is what they refer to; anything else of the engine is a `NameError` when it is reached."""
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        found = [self.find(file, name) for name in names]
        for node in found:
            node.decorator_list = []
        module = ast.fix_missing_locations(ast.Module([future, *found], []))
        namespace = {"__name__": "builtins", **known}
        exec(compile(module, str(self.root / file), "exec"), namespace)
        return namespace
