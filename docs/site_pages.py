"""Builds the site of this version, next to those of others; the README is its first page.

build/site/VERSION has the pages, build/site/versions.json the versions for the theme's menu (in the
format of mike), and build/site/index.html redirects to the latest version.
"""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from packaging.version import Version

import trainvitals
from docs import llms_pages
from docs.api_page import site_page

ROOT = Path(__file__).parents[1]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build into a directory named after the version."""
    config.site_dir = str(Path(config.site_dir) / trainvitals.__version__)
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """List all versions of the site, latest first."""
    site = Path(config.site_dir).parent
    versions = sorted((p.parent.name for p in site.glob("*/index.html")), key=Version, reverse=True)
    listed = [
        {"version": version, "title": version, "aliases": ["latest"] if i == 0 else []}
        for i, version in enumerate(versions)
    ]
    (site / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    newest = f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n'
    (site / "index.html").write_text(f"<!doctype html>\n{newest}")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let mkdocstrings write the API reference: it links types and has a search index."""
    return site_page() if page.file.src_uri == "API.md" else markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root directory, with links that work from docs/, and llms*.txt."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    files.remove(files.src_uris["llms.txt"])
    files.append(File.generated(config, "llms.txt", content=llms_pages.index(".html")))
    files.append(File.generated(config, "llms-full.txt", content=llms_pages.full()))
    return files
