"""README and docs: links lead somewhere, each script has its page, each metric its explanation."""

import ast
import importlib
import re

import jax
import pytest
from helpers import ROOT, SCRIPTS, Game
from stages import whole_iteration

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADINGS = ["Overview", "Usage", "Explanation of the logged metrics", "Implementation details", "Results"]
BONUSES = {
    "etd_ppo": [dict(bonus=bonus) for bonus in ("etd", "ctec")],
    "ctec_ppo_noisy_tv": [dict(bonus=bonus) for bonus in ("ctec", "rnd", "forward_error")],
}
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


def section(text, anchor):
    """What stands under the heading with this anchor, up to the next heading of any level."""
    for part in re.split(r"^(?=#+ )", text, flags=re.M):
        if anchors(part) and anchors(part)[0] == anchor:
            return part
    raise KeyError(anchor)


def explained(text):
    """The names at the head of a list's items, in backticks and before a colon."""
    items = re.findall(r"^- (`\w+`(?:,? `\w+`)*): \S", text, re.M)
    return {name for names in items for name in re.findall(r"\w+", names)}


def test_explanations_are_found():
    page = "## One\n- `a`, `b`: words\n- `c` `d`: words\n`e`: no item\n- `f`:\n## Two: `x`\n- `g`: words\n"
    assert explained(section(page, "one")) == {"a", "b", "c", "d"}
    assert explained(section(page, "two-x")) == {"g"}
    with pytest.raises(KeyError):
        section(page, "three")


def logged(module):
    """The columns of metrics.csv: what Run and the stages of an iteration log, with every bonus that the script has."""
    names = {"iteration", "steps", "seconds", "steps_per_second"}
    env_name = "point_u_maze" if "point_u_maze" in getattr(module, "ENVS", ()) else module.Args().env
    for bonus in BONUSES.get(module.__name__, ({},)):
        args = module.Args(env=env_name, **bonus)
        if hasattr(module, "make_noisy_tv"):
            env = module.make_noisy_tv(args)
        else:
            env = module.make_env(args.env) if hasattr(module, "make_env") else Game()
        state = jax.eval_shape(lambda args=args, env=env: module.init_state(args, env))
        names |= set(jax.eval_shape(whole_iteration(module, args, env), state)[1])
    return names


@pytest.mark.parametrize("script", SCRIPTS, **by_name)
def test_every_metric_is_explained(script):
    """By the script's page, or by those sections of runs.md to which its page sends the reader."""
    own = section((ROOT / "docs" / f"{script.stem}.md").read_text(), anchors(f"# {HEADINGS[2]}")[0])
    shared = (ROOT / "docs" / "runs.md").read_text()
    found = explained(own).union(*(explained(section(shared, name)) for name in re.findall(r"runs\.md#([\w-]+)", own)))
    module = importlib.import_module(script.stem)
    toys = "study case method round metric value".split()
    metrics = logged(module) if hasattr(module, "RunState") else toys
    assert metrics and not [name for name in metrics if name not in found]


def test_docs_are_short():
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")) <= 20_000


def sentences(text):
    """The sentences of a page's prose: no code blocks, tables, headings or images; a link counts as its words."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    text = re.sub(r"^[|#<].*$", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [words for part in re.split(r"\n\s*\n|^- ", text, flags=re.M) for words in re.split(r"(?<=[.!?])\s+", part)]


def test_sentences_are_found():
    page = "# A. B\n\nOne two\nthree. [Four](x.md) five!\n\n| no. | no |\n\n```bash\nno. no\n```\n- Six\n- Seven 0.1\n"
    assert [s.split() for s in sentences(page) if s.split()] == [
        ["One", "two", "three."], ["Four", "five!"], ["Six"], ["Seven", "0.1"]
    ]  # fmt: skip


def test_readme_has_short_sentences():
    long = [words for words in sentences((ROOT / "README.md").read_text()) if len(words.split()) > 35]
    assert not long
