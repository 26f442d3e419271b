import re
from pathlib import Path

from vitals_dashboard import layout

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "dashboard.md"
OF_NO_RUN = {"Fleet", "Run", "Compare", "Alerts", "Query"}
MAX_BYTES = 200 * 1024
"""A repository keeps every version of a picture."""


def test_the_guide_shows_every_page_with_a_picture_of_moderate_size():
    _, *sections = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)
    of_a_run = {label for label, _ in layout.RUN_PAGES.values()} - {"Curves"}
    assert OF_NO_RUN | of_a_run == {text.partition("\n")[0] for text in sections}
    for text in sections:
        pictures = [GUIDE.parent / found for found in re.findall(r"!\[[^]]+\]\((.+)\)", text)]
        assert pictures, text
        for picture in pictures:
            assert picture.read_bytes().startswith(b"\x89PNG"), picture
            assert MAX_BYTES >= picture.stat().st_size, picture
