import pytest

from trainvitals.units import humanize


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "bytes", "-"),
        (float("nan"), "seconds", "nan"),
        (0, "bytes", "0 B"),
        (1536, "bytes", "1.5 KiB"),
        (141 * 2**30, "bytes", "141 GiB"),
        (0, "seconds", "0 ms"),
        (0.00085, "seconds", "850 us"),
        (0.0009996, "seconds", "1 ms"),
        (0.0123, "seconds", "12.3 ms"),
        (0.9997, "seconds", "1 s"),
        (12.34, "seconds", "12.3 s"),
        (200, "seconds", "3 min 20 s"),
        (7265, "seconds", "2 h 1 min"),
        (187200, "seconds", "2 d 4 h"),
        (0.413, "ratio", "41.3 %"),
        (312, "watts", "312 W"),
        (71, "celsius", "71 °C"),
        (1_980_000_000, "hertz", "1.98 GHz"),
        (12_345_678, "tokens", "12.35 M"),
        (999, "tokens", "999"),
        (2.123456, "", "2.123"),
    ],
)
def test_a_number_is_written_as_a_person_would(value: float | None, unit: str, text: str) -> None:
    assert text == humanize(value, unit)
