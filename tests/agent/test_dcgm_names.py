import re
from pathlib import Path

from trainvitals.catalog import GPU_METRICS

PAGE = Path(__file__).parents[2] / "docs" / "GPU_METRICS.md"
ROW = re.compile(r"\| `(gpu_\w+)` \| `(DCGM_FI_(?:DEV|PROF)_[A-Z0-9_]+)` \| (.+) \|")


def test_the_page_says_of_every_gpu_metric_what_dcgm_exporter_calls_it():
    found = ROW.findall(PAGE.read_text())
    assert [metric.name for metric in sorted(GPU_METRICS, key=lambda m: m.name)] == sorted(
        ours for ours, _, _ in found
    )


def test_what_is_scaled_on_the_page_is_what_has_another_unit():
    scaled = {ours for ours, _, how in ROW.findall(PAGE.read_text()) if how[0] in "/*"}
    units = {"ratio", "bytes", "joules", "hertz"}
    other = ("pcie", "nvlink")  # rates, and one number of theirs that is two of ours
    expected = {
        m.name for m in GPU_METRICS if m.unit in units and not any(o in m.name for o in other)
    }
    assert expected == scaled
