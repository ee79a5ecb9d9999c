"""The documentation is true: the site builds strictly, every code block runs, and no page names
what it should not.

A fenced block in README.md or docs/ that starts with ```python, ```bash or ```console is executed
in a folder of its page: python blocks in order in one process, bash blocks after them, one by one.
Of a console block the lines after "$ " are commands. A block that needs other hardware, a network
or minutes says so: ```bash {not-run="needs two machines"}."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from dpcsgp.config import Config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TUTORIAL = DOCS / "tutorial.py"
LANGUAGES = ("python", "bash", "console")
SHORTEST_REASON = 10
# Anchored at the left margin; an indented fence would escape the test and is refused below.
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r'\{not-run="(?P<reason>[^"]*)"\}')
REGISTRIES = (
    "pypi.org",
    "pythonhosted.org",
    "anaconda.org",
    "conda.io",
    "npmjs.org",
    "npmjs.com",
    "crates.io",
    "docker.io",
)
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|Users|mnt|opt|usr)/")


@dataclass(frozen=True)
class Block:
    """One fenced block of code, and the line at which it starts."""

    language: str
    reason: str | None  # why it is not run
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        marked = NOT_RUN.fullmatch(rest.strip())
        line = text.count("\n", 0, match.start()) + 2
        # A misspelt mark gives an empty reason: the block is not run, and `test_no_block_escapes`
        # names it.
        reason = marked["reason"] if marked else "" if "not-run" in rest else None
        found.append(Block(language, reason, match["code"], line))
    return found


def commands(block: Block) -> str:
    if block.language == "bash":
        return block.code
    return "\n".join(line[2:] for line in block.code.splitlines() if line.startswith("$ "))


def environment() -> dict[str, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "MPLBACKEND": "Agg",
    }


def execute(command: list[str], folder: Path, what: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, (
        f"{what} ended with code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    )


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in LANGUAGES and block.reason is None]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name)
def test_every_code_block_runs(page: Path, tmp_path: Path) -> None:
    for part in ("configs", "examples", "docs/figures"):
        shutil.copytree(ROOT / part, tmp_path / part)
    python = [block for block in runnable(page) if block.language == "python"]
    if python:
        # Empty lines keep the page's line numbers, so that a traceback points into the page.
        text = ""
        for block in python:
            text += "\n" * (block.line - 1 - text.count("\n")) + block.code
        (tmp_path / "page.py").write_text(text, encoding="utf-8")
        execute([sys.executable, "page.py"], tmp_path, f"python of {name(page)}")
    for block in runnable(page):
        if block.language != "python":
            what = f"{name(page)}, line {block.line}"
            execute(["bash", "-e", "-o", "pipefail", "-c", commands(block)], tmp_path, what)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_escapes(page: Path) -> None:
    """Fences are well formed, have a language, and say why they are not run if they are not."""
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks(page)), "a fence is indented, unclosed or nested"
    for block in blocks(page):
        assert block.language, f"line {block.line}: name a language; 'text' for what is not code"
        assert block.language not in ("sh", "shell", "py", "python3"), (
            f"line {block.line}: write bash or python"
        )
        if block.reason is not None:
            said = (
                f'line {block.line - 1}: write {{not-run="why"}} after the language, '
                "with a reason of some words"
            )
            assert len(block.reason) >= SHORTEST_REASON, said


@pytest.mark.slow
def test_tutorial_runs(tmp_path: Path) -> None:
    execute([sys.executable, str(TUTORIAL)], tmp_path, "docs/tutorial.py")
    assert list(tmp_path.rglob("*.png")), "the tutorial draws a figure"


def test_tutorial_is_cells() -> None:
    lines = TUTORIAL.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# %% [markdown]"
    assert sum(line == "# %%" for line in lines) >= 5


@pytest.mark.parametrize("page", [*PAGES, TUTORIAL, ROOT / "mkdocs.yml"], ids=name)
def test_no_registry_and_no_machine_path(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [host for host in REGISTRIES if host in text]
    assert not MACHINE_PATHS.findall(text)


def test_every_page_is_in_the_navigation() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [
        path
        for page in DOCS.rglob("*.md")
        if (path := page.relative_to(DOCS).as_posix()) not in menu
    ]
    assert not missing


def test_files_that_pages_name_exist() -> None:
    """Names of files move; `comparison.md` names those of other projects."""
    named = {
        file
        for page in (*PAGES, ROOT / "CONTRIBUTING.md")
        if page.name != "comparison.md"
        for file in re.findall(
            r"`([a-z_]+(?:/[a-z_-]+)+\.(?:py|md|toml))`", page.read_text("utf-8")
        )
    }
    folders = (ROOT, ROOT / "src" / "dpcsgp", ROOT / "tests")
    assert len(named) > 20
    assert not [file for file in named if not any((folder / file).is_file() for folder in folders)]


def test_tests_that_the_proof_names_exist() -> None:
    text = (DOCS / "privacy-proof.md").read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    everything = "\n".join(files.values())
    named = re.findall(r"`(?:stress/)?(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", text)
    found = [(file, test) for file, test in named if file or test]
    assert len(found) > 15
    for file, test in found:
        assert not file or file in files, file
        assert not test or f"def {test}(" in (files[file] if file else everything), test


def test_every_setting_is_explained_with_its_default() -> None:
    rows = re.findall(
        r"^\| `([a-z]+\.[a-z0-9_]+)` \| `([^`]*)` \| .{6,} \|$",
        (DOCS / "reference.md").read_text(),
        re.MULTILINE,
    )
    defaults = Config().model_dump(mode="json")
    assert {key: json.loads(value) for key, value in rows} == {
        f"{section}.{key}": value
        for section, values in defaults.items()
        for key, value in values.items()
    }


@pytest.mark.slow
def test_site_builds_strictly_and_asks_nothing_of_the_outside(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None:
        pytest.skip('mkdocs is not installed: pip install -e ".[docs]"')
    execute(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        ROOT,
        "mkdocs",
    )
    pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > len(list(DOCS.rglob("*.md"))) - 1
    asked = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:)?//"
        r"|<link[^>]+(?:stylesheet|preconnect|preload)[^>]+//"
    )
    assert not [found[0] for page in pages if (found := asked.search(page))]


def test_pictures_are_small() -> None:
    heavy = [
        path.name
        for path in (DOCS / "figures").glob("concept-*.png")
        if path.stat().st_size >= 150_000
    ]
    assert not heavy


def test_the_index_page_links_to_nothing_that_only_the_repository_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / project["readme"]).read_text(encoding="utf-8")
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))
    assert "pip install dpcsgp" in text
    for page in (ROOT / "README.md", DOCS / "index.md"):
        assert "`pip install .`" in page.read_text(encoding="utf-8")
