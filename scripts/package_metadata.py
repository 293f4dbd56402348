"""Hatchling's metadata hook: the project's addresses, and the README as a package index shows it.

The repository does not know where it is published; a build is told. It takes the address from the
variable ZEROXLA_URL, from the variables of a GitHub workflow, or, if it builds from an sdist, from
the sdist. With an address the package has project URLs, and the README's links and pictures lead
there. A build without an address has no URLs, and no links that would lead nowhere: in its README a
link becomes its text, and a picture its description.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Homepage": "",
    "Source": "",
    "Documentation": "/blob/HEAD/docs/index.md",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}
# [text](target), and ![text](target) for pictures; targets that have no scheme and are no anchor.
_LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?P<target>(?!\w+:|#)[^)\s]+)\)"
)


class CustomMetadataHook(MetadataHookInterface):
    """Sets the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        root = Path(self.root)
        url = project_url(root, os.environ)
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_for_index(text, url)}
        metadata["urls"] = {} if url is None else {name: url + page for name, page in PAGES.items()}


def project_url(root: Path, environ: Mapping[str, str]) -> str | None:
    """Return the address of the repository; None if nothing says it.

    Args:
      root: the folder of pyproject.toml.
      environ: the environment's variables.
    """
    if told := environ.get("ZEROXLA_URL"):
        return told.rstrip("/")
    if (repository := environ.get("GITHUB_REPOSITORY")) and environ.get("GITHUB_ACTIONS"):
        return f"{environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    record = root / "PKG-INFO"  # an sdist has it
    if not record.is_file():
        return None
    fields = HeaderParser().parsestr(record.read_text(encoding="utf-8")).get_all("Project-URL", [])
    return dict(field.split(", ", 1) for field in fields).get("Source")


def readme_for_index(text: str, url: str | None) -> str:
    """Return the README without links that lead nowhere outside of the repository.

    Args:
      text: the README, in Markdown.
      url: the address of the repository; None makes text of links.
    """

    def replace(match: re.Match[str]) -> str:
        picture, target = match["picture"], match["target"]
        label = match["text"] if picture else readme_for_index(match["text"], url)
        if url is None:
            return label
        return f"{picture}[{label}]({url}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return _LINK.sub(replace, text)
