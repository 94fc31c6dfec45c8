"""Bring files of the repository that stand outside of `docs` into the site.

A page links to them as the forge does, by `../examples/resume.py`; a file of the root links to `docs/launch.md`. In the
site `docs` is the root, so both lose their first step. Markdown becomes a page, anything else is there to be read.
Every page is there as Markdown too, and `llms.txt` lists them.
Parts of pages that are made from the code are made anew: see `site_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from site_tables import filled  # mkdocs looks for modules beside its hooks

ROOT_PAGES = (
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
)
EXAMPLES = "examples"
_LINK_UP = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[^)#]+)")
_LINK_BESIDE = re.compile(r"\]\((?P<path>[\w/]+\.py)\)")
_INTO_DOCS = re.compile(r"\]\(docs/")
_UP_INTO_DOCS = re.compile(r"\]\(\.\./docs/")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the examples, and whatever a page of `docs` links to."""
    root = Path(config.docs_dir).parent
    linked = {
        found["path"]
        for page in files.documentation_pages()
        for found in _LINK_UP.finditer(page.content_string)
        if _leaves_docs(found, page)
    }
    beside = {  # what `benchmarks/README.md` names in its own folder
        f"{Path(page).parent}/{found['path']}"
        for page in ROOT_PAGES
        if "/" in page
        for found in _LINK_BESIDE.finditer((root / page).read_text(encoding="utf-8"))
    }
    examples = {f"{EXAMPLES}/{path.name}" for path in (root / EXAMPLES).glob("*.*")}
    for path in sorted({*ROOT_PAGES, *beside, *examples, *linked}):
        if (
            root / path
        ).is_file():  # what is not there stays a broken link, which the build reports
            files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Let links between `docs` and the root lead to the same files in the site, and make what is made."""
    text = _with_links_of_the_site(markdown, page.file)
    source = Path(page.file.abs_dest_path).with_suffix(".md")
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text, encoding="utf-8")  # the page as Markdown, beside it
    return text


def _with_links_of_the_site(markdown: str, file: File) -> str:
    if file.generated_by is not None:
        return _UP_INTO_DOCS.sub("](../", _INTO_DOCS.sub("](", markdown))

    def one_up(found: re.Match[str]) -> str:
        up = found["up"][3:] if _leaves_docs(found, file) else found["up"]
        return f"]({up}{found['path']}"

    return _LINK_UP.sub(one_up, filled(markdown))


def _leaves_docs(link: re.Match[str], page: File) -> bool:
    return link["up"].count("../") > page.src_uri.count("/")


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> Navigation:
    """Write `llms.txt`: every page of the navigation as Markdown, by group, for programs that read."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for group in nav.items:
        lines += ["", f"## {group.title}", ""]
        lines += [f"- [{title}]({address})" for title, address in _pages_below(group)]
    folder = Path(config.site_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return nav


def _pages_below(item: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(item, Page):
        yield (
            f"{path}{item.title}",
            Path(item.file.dest_uri).with_suffix(".md").as_posix(),
        )
    for child in item.children or ():
        above = f"{path}{item.title}: " if item.parent is not None else path
        yield from _pages_below(child, above)
