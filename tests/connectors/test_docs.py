"""docs/engines: the configurations parse, and name what exists."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvcsfs.connectors.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "engines").glob("*.md"))
SETTINGS = {field.name for field in fields(Settings)}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def names_of(module: str) -> set[str]:
    """What a connector's source defines; it can't be imported without its engine."""
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_parses_and_imports_what_exists(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvcsfs"):
                assert {alias.name for alias in node.names} <= names_of(str(node.module))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_modules_and_classes_of_configurations_exist(page):
    text = page.read_text()
    found = re.findall(r'module_path"?: "?(kvcsfs[\w.]+).*?class_name"?: "?(\w+)', text, flags=re.DOTALL)
    assert found or page.stem not in ("sglang", "lmcache")
    for module, name in found:
        assert name in names_of(module)


def test_json_is_json_and_its_options_exist():
    (sglang,) = blocks(ROOT / "docs/engines/sglang.md", "json")
    assert {name.removeprefix("kvcs.") for name in json.loads(sglang) if name.startswith("kvcs.")} <= SETTINGS
    (command,) = blocks(ROOT / "docs/engines/vllm.md", "sh")
    config = json.loads(command[command.index("{") : command.rindex("}") + 1])
    (tier,) = config["kv_connector_extra_config"]["secondary_tiers"]
    assert tier.keys() - {"type", "module_path"} <= SETTINGS
    assert tier["type"] in names_of(tier["module_path"])
    adapter = re.search(r"--l2-adapter '(\{.*\})'", (ROOT / "docs/engines/lmcache.md").read_text())
    assert adapter
    assert json.loads(adapter[1])["adapter_params"].keys() <= SETTINGS


def test_every_option_is_explained_with_its_default():
    text = (ROOT / "docs/engines/README.md").read_text()
    rows = dict(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+?) \|", text, flags=re.MULTILINE))
    explained = {name for names in rows for name in re.findall(r"\w+", names)}
    assert explained >= SETTINGS
    assert rows["`deadline_s`"] == str(Settings().deadline_s)
    assert (
        rows["`queue_bytes`, `queue_items`"]
        == f"{Settings().queue_bytes >> 30} GiB, {Settings().queue_items}"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
