"""README and docs: links lead somewhere, each script has its page, each metric its explanation."""

import ast
import importlib
import re

import pytest
from helpers import ROOT, SCRIPTS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADINGS = ["Overview", "Usage", "Explanation of the logged metrics", "Implementation details", "Results"]
by_name = dict(ids=lambda path: path.name)


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def headings(text):
    return re.findall(r"^#+ (.+?)\s*$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)


def anchors(text):
    """The names that GitHub gives to the headings of a page, and those that the page gives itself."""
    named = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)]
    return named + re.findall(r'<a (?:id|name)="([^"]+)"', text)


def targets(text):
    """Where the links and images of a page lead, [words](target) and <img src="target">."""
    text = without_code(text)
    return re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)


def broken_links(page):
    for target in targets(page.read_text()):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, part = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{target}: no such file"
        elif part and part not in anchors(file.read_text()):
            yield f"{target}: no such heading"


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One: `two` three\n[a](page.md) [b](#one-two-three) ![c](gone.png) `[d](code.md)` [e](https://x.org/y)\n"
        '```\n# [f](block.md)\n```\n<img src="lost.png" width="3"> [g](page.md#four) [h](#five) <a id="five"></a>\n'
    )
    assert [link.split(":")[0] for link in broken_links(page)] == ["gone.png", "page.md#four", "lost.png"]


@pytest.mark.parametrize("page", PAGES, **by_name)
def test_links(page):
    assert not list(broken_links(page))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("script", SCRIPTS, **by_name)
def test_script_has_its_page(script):
    page = ROOT / "docs" / f"{script.stem}.md"
    assert f"docs/{page.name}" in ast.get_docstring(ast.parse(script.read_text()))
    assert page.exists()
    assert [heading for heading in headings(page.read_text()) if heading in HEADINGS] == HEADINGS


@pytest.mark.parametrize("script", SCRIPTS, **by_name)
def test_every_metric_is_explained(script):
    page = (ROOT / "docs" / f"{script.stem}.md").read_text()
    metrics = importlib.import_module(script.stem).METRICS
    explained = page.split(HEADINGS[2])[-1].split(HEADINGS[3])[0]
    assert metrics and not [name for name in metrics if f"`{name}`" not in explained]
