"""The code in the documents: it parses, and what it imports from `kvcs` is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcs

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def python_blocks(document: Path) -> Iterator[ast.Module]:
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL):
        yield ast.parse(block, filename=str(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_the_code_imports_from_kvcs_exists(document: Path):
    for block in python_blocks(document):
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom) and node.module == "kvcs":
                assert {alias.name for alias in node.names} <= set(kvcs.__all__)


def test_the_sdk_document_names_everything_that_kvcs_exports():
    text = (ROOT / "docs" / "sdk.md").read_text()
    assert [name for name in kvcs.__all__ if name not in text] == []


def test_kvcs_exports_what_it_lists_and_nothing_else():
    public = {name for name in vars(kvcs) if not name.startswith("_")}
    assert public == set(kvcs.__all__)
