"""Makes the site of this version, beside those of others; the README is its first page.

build/site/VERSION has the pages, build/site/versions.json what the theme's menu of versions reads
(as mike writes it), and build/site/index.html goes to the newest.
"""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from packaging.version import Version

import trainvitals

ROOT = Path(__file__).parents[1]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give this version a folder of its own."""
    config.site_dir = str(Path(config.site_dir) / trainvitals.__version__)
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """List the versions that lie beside this one, newest first."""
    site = Path(config.site_dir).parent
    versions = sorted((p.parent.name for p in site.glob("*/index.html")), key=Version, reverse=True)
    listed = [
        {"version": version, "title": version, "aliases": ["latest"] if i == 0 else []}
        for i, version in enumerate(versions)
    ]
    (site / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    newest = f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n'
    (site / "index.html").write_text(f"<!doctype html>\n{newest}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies beside docs/, with its links as they are seen from there."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files
