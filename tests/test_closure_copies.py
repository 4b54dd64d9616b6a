"""The files that the Hub loads: the example drafters link them, and the Hub can follow their imports."""

import ast
import re
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "configuration_hyperdflash.py",
    "modeling_hyperdflash.py",
    "target_hyperdflash.py",
    "generation_hyperdflash.py",
    "pairing_hyperdflash.py",
)
CLOSURE = (*MODULES, "custom_generate/generate.py")
THIRD_PARTY = {"torch", "transformers", "huggingface_hub", "packaging"}


def imports(name: str) -> list[ast.Import | ast.ImportFrom]:
    """All imports of a file, those in functions and conditions included."""
    tree = ast.parse((ROOT / name).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("folder", ["drafter", "drafter-paper"])
def test_the_drafters_in_the_examples_link_the_roots_files(folder):
    folder = ROOT / "examples" / "tiny" / folder
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    assert set(found) == set(CLOSURE)
    for name, path in found.items():
        assert path.is_symlink(), f"{path} is a plain file: was the repository cloned without core.symlinks?"
        assert not path.readlink().is_absolute()
        assert path.resolve() == ROOT / name


@pytest.mark.parametrize("name", MODULES)
def test_local_imports_are_flat_and_shipped(name):
    """`from .name import x` alone is found by the Hub's loader, which goes by pattern, docstrings included.

    https://github.com/huggingface/transformers/issues/29714
    """
    local = [node for node in imports(name) if isinstance(node, ast.ImportFrom) and node.level]
    assert all(node.level == 1 and node.module and "." not in node.module for node in local)
    assert all(f"{node.module}.py" in MODULES for node in local)
    by_pattern = re.findall(r"^\s*(?:from|import)\s+\.(\S*)", (ROOT / name).read_text(), flags=re.MULTILINE)
    assert sorted(by_pattern) == sorted(node.module for node in local)


def test_custom_generate_imports_nothing():
    """A failing import there is swallowed, and plain decoding runs without a word."""
    assert imports("custom_generate/generate.py") == []


@pytest.mark.parametrize("name", MODULES)
def test_third_party_imports_are_what_a_user_of_transformers_has(name):
    allowed = THIRD_PARTY | set(sys.stdlib_module_names)
    for node in imports(name):
        if isinstance(node, ast.Import):
            found = {alias.name.split(".")[0] for alias in node.names}
        else:
            found = {node.module.split(".")[0]} if not node.level else set()
        assert found <= allowed, f"{name} imports {sorted(found - allowed)}"


@pytest.mark.parametrize("name", MODULES[:2])
def test_each_auto_class_brings_the_whole_closure(name):
    """From the model, and from the configuration: its module's hash has to change with any of the files, or two
    folders whose code differs would be taken for one.

    https://github.com/huggingface/transformers/issues/45698
    """
    followed = {Path(path).name for path in get_relative_import_files(ROOT / name)} | {name}
    assert followed == set(MODULES)
