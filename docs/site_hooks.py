"""Bring files of the repository that stand outside of `docs` into the site.

A page links to them as the forge does, by `../examples/resume.py`; a file of the root links to `docs/launch.md`. In the
site `docs` is the root, so both lose their first step. Markdown becomes a page, anything else is there to be read.
Parts of pages that are made from the code are made anew: see `site_tables.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_tables import filled  # mkdocs looks for modules beside its hooks

ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
EXAMPLES = "examples"
_TO_THE_ROOT = re.compile(r"\]\(\.\./(?P<path>[^)#]+)")
_INTO_DOCS = re.compile(r"\]\(docs/")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the examples, and whatever a page of `docs` links to."""
    root = Path(config.docs_dir).parent
    linked = {
        found["path"]
        for page in files.documentation_pages()
        for found in _TO_THE_ROOT.finditer(page.content_string)
    }
    examples = {f"{EXAMPLES}/{path.name}" for path in (root / EXAMPLES).glob("*.*")}
    for path in sorted({*ROOT_PAGES, *examples, *linked}):
        if (
            root / path
        ).is_file():  # what is not there stays a broken link, which the build reports
            files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Let links between `docs` and the root lead to the same files in the site, and make what is made."""
    if page.file.generated_by is not None:
        return _INTO_DOCS.sub("](", markdown)
    return _TO_THE_ROOT.sub(r"](\g<path>", filled(markdown))
