"""The site builds without a warning, and no link in it or in the pages of the root leads nowhere."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.tools.report.browser import PROGRAM, Browser

from .pages import ROOT, ROOT_PAGES, name_of

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")

_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
_HARMLESS = {"canonical", "next", "prev", "edit"}


class _Page(HTMLParser):
    """What a page offers as a target, where it leads, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for value in (found.get("id"), found.get("name")) if value}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in _LOADED and found.get(_LOADED[tag]) and found.get("rel") not in _HARMLESS:
            self.loaded.append(str(found[_LOADED[tag]]))
        self.loaded += [part.split()[0] for part in (found.get("srcset") or "").split(",") if part.strip()]


@cache
def _read(path: Path) -> _Page:
    return _Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    warnings: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(listener)
    try:
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=False)  # to see all, not the first
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(listener)
    assert not warnings, "\n".join(warnings)
    return folder


def _broken(page: Path, link: str, site: Path) -> str | None:
    """Say what is wrong with a link of a built page."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None if parts.scheme in ("http", "https", "mailto") and (parts.netloc or parts.path) else "no address"
    target = page
    if parts.path:
        base = site if parts.path.startswith("/") else page.parent
        target = (base / unquote(parts.path).lstrip("/")).resolve()
        if target.is_dir():
            target /= "index.html"
    if not target.is_file() or not target.is_relative_to(site.resolve()):
        return "no such page"
    if parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in _read(target).anchors:
        return "no such place in the page"
    return None


def _pages(site: Path) -> Iterator[Path]:
    yield from (path for path in sorted(site.resolve().rglob("*.html")) if path.name != "404.html")


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    broken, count = [], 0
    for page in _pages(site):
        for link in [*_read(page).links, *_read(page).loaded]:
            count += 1
            if problem := _broken(page, link, site):
                broken.append(f"{page.relative_to(site.resolve())}: {link}: {problem}")
    assert not broken, "\n".join(broken)
    assert count > 1000


def test_the_site_loads_nothing_from_anywhere(site: Path) -> None:
    foreign = [(page.name, link) for page in _pages(site) for link in _read(page).loaded if urlsplit(link).netloc]
    assert not foreign
    styles = [style for style in site.rglob("*.css") if re.search(r"url\(['\"]?https?:", style.read_text())]
    assert not styles


@pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")
def test_the_search_finds_a_page_on_a_server_and_on_a_disk_and_asks_nobody_else(site: Path, tmp_path: Path) -> None:
    with _served(site) as address, Browser(tmp_path) as browser:
        for start in (address, site.as_uri()):
            browser.events.clear()
            _search(browser, start)
            events = [event.get("params", {}) for event in browser.events]
            asked = [event["request"]["url"] for event in events if "request" in event]
            assert asked
            assert [url for url in asked if not url.startswith((start, "data:", "blob:"))] == []


def _search(browser: Browser, site: str) -> None:
    browser.send("Page.navigate", url=f"{site}/index.html")
    is_there = "document.querySelector('.md-search__input') !== null && document.readyState === 'complete'"
    browser.wait(f"location.href.startsWith('{site}') && {is_there}")
    browser.run("document.querySelector('.md-search__input').focus()")
    browser.send("Input.insertText", text="feistel")
    browser.run("document.querySelector('.md-search__input').dispatchEvent(new KeyboardEvent('keyup'))")
    browser.wait("document.querySelector('.md-search-result__link[href*=\"data_order.html\"]') !== null")


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, without a word for every request."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_reference_shows_what_the_docstrings_say(site: Path) -> None:
    pages = [_read(page) for page in (site.resolve() / "reference").glob("*.html")]
    shown = {anchor for page in pages for anchor in page.anchors}
    assert {"meshwright.Accelerator", "meshwright.Accelerator.prepare", "meshwright.PartialState"} <= shown
    assert "meshwright.ProjectConfiguration(total_limit)" in shown
    assert "meshwright.Accelerator(mixed_precision)" in shown


def test_every_page_is_there_as_markdown_and_listed_for_programs(site: Path) -> None:
    listed = re.findall(r"\]\((.+?\.md)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    assert {"index.md", "quick_tour.md", "reference/accelerator.md", "SKILL.md", "benchmarks/index.md"} <= set(listed)
    for name in listed:
        text = (site / name).read_text(encoding="utf-8")
        broken = [
            link["target"]
            for link in _LINK.finditer(text)
            if not urlsplit(link["target"]).netloc
            and not urlsplit(link["target"]).path.endswith("README.md")  # is index.html in the site
            and urlsplit(link["target"]).path
            and not (site / name).parent.joinpath(unquote(urlsplit(link["target"]).path)).exists()
        ]
        assert not broken, f"{name}: {broken}"


def test_every_page_is_in_one_of_five_groups_of_eight(site: Path) -> None:
    groups = yaml.safe_load(re.sub(r"!!python\S+|!ENV", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))["nav"]
    assert [name for group in groups for name in group] == ["Start", "Train", "Scale", "Operate", "Reference"]
    for group in groups:
        for name, entries in group.items():
            assert len(entries) <= 8, name


def test_signatures_are_wrapped(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "accelerator.html").read_text(encoding="utf-8"))
    assert re.search(r"^Accelerator\(\n    device_placement: bool = True,\n", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", ROOT_PAGES, ids=name_of)
def test_every_link_of_a_page_of_the_root_leads_somewhere(page: Path) -> None:
    broken = [link["target"] for link in _LINK.finditer(page.read_text(encoding="utf-8")) if not _leads(page, link)]
    assert not broken


def _leads(page: Path, link: re.Match[str]) -> bool:
    parts = urlsplit(link["target"])
    if parts.scheme or parts.netloc:
        return parts.scheme in ("http", "https", "mailto") and bool(parts.netloc or parts.path)
    target = page.parent / unquote(parts.path) if parts.path else page
    if not target.exists():
        return False
    return not parts.fragment or parts.fragment in _headings(target)


@cache
def _headings(page: Path) -> set[str]:
    """Return the anchors that a forge gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
