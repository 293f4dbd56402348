"""Hooks of mkdocs.yml: the site also shows pages that lie outside of docs/.

Notebooks, the figures' result files, the changelog and the page for contributors stay where people
look for them in the repository; here they become pages, and links to them are rewritten. The first
page opens with what the README opens with.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Where a page's path on the site begins, and which files there are pages or pictures of pages.
OUTSIDE = {
    ROOT: ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "notebooks/*.ipynb"),
    ROOT / "benchmarks": ("results/*.md", "results/*.png"),
}
FIRST = "index.md"
OPENING_ENDS = "\n## Which tool for what"
"""The heading of the README before which its opening ends: pitch, pictures, commands, ten lines."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def _outside() -> dict[str, Path]:
    """Return the files from outside, by their path on the site."""
    return {
        path.relative_to(start).as_posix(): path
        for start, patterns in OUTSIDE.items()
        for pattern in patterns
        for path in sorted(start.glob(pattern))
    }


@event_priority(100)  # before the notebooks' plugin looks for them
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for place, path in _outside().items():
        start = str(path)[: -len(place)]
        files.append(File(place, start, config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the places that pages have on the site."""
    here = page.file.src_uri
    source = _outside().get(here, Path(config.docs_dir) / here)
    if here != FIRST:
        return _moved(markdown, source, here, config)
    opening, found, _ = (ROOT / "README.md").read_text().partition(OPENING_ENDS)
    if not found:
        raise PluginError(f"README.md has no heading {OPENING_ENDS.strip()!r}")
    _, _, rest = markdown.partition("\n## ")  # its title and pitch are the README's
    opening = _moved(opening, ROOT / "README.md", here, config)
    return f"{opening}\n## {_moved(rest, source, here, config)}"


def _moved(markdown: str, source: Path, here: str, config: MkDocsConfig) -> str:
    """Return a page's text with its links changed.

    Args:
      markdown: the text.
      source: the file that the links are relative to.
      here: the page's path on the site.
      config: the site's configuration.
    """
    places = {path: place for place, path in _outside().items()}
    docs = Path(config.docs_dir)

    def moved(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        aim = Path(posixpath.normpath(source.parent / target))
        if "://" in target or not aim.exists():
            return match[0]
        place = places.get(aim) or posixpath.relpath(aim, docs)
        link = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"{opening}{link}{anchor or ''}{closing}"

    # Tests run a block whose fence says so; Markdown for the site takes a language alone.
    return _LINK.sub(moved, markdown.replace("```python runnable\n", "```python\n"))
