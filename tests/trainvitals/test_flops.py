import pytest

from trainvitals.flops import mfu_ratio, peak_flops, transformer_flops_per_token


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA B200", 2250.0),
        ("NVIDIA B300", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_known_device_has_its_data_sheets_dense_bf16_peak(name: str, tera: float) -> None:
    assert pytest.approx(tera * 1e12) == peak_flops(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "AMD Instinct MI300A",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H20-3e",
        "NVIDIA A10G",
        "NVIDIA RTX A4000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Tesla V100-DGXS-32GB",
        "Quadro T400",
    ],
)
def test_a_device_that_is_not_known_for_sure_has_no_peak(name: str) -> None:
    assert None is peak_flops(name)


def test_a_type_the_device_does_not_have_has_no_peak() -> None:
    assert None is peak_flops("Tesla V100-SXM2-32GB", "bf16")
    assert 125e12 == peak_flops("Tesla V100-SXM2-32GB", "fp16")
    assert None is peak_flops("Tesla T4")
    assert pytest.approx(8.1e12) == peak_flops("Tesla T4", "fp32")


def test_flops_per_token_are_six_per_parameter_and_the_attention() -> None:
    assert 6e9 == transformer_flops_per_token(10**9)
    attention = 12 * 24 * 2048 * 1024
    assert 6e9 + attention == transformer_flops_per_token(
        10**9, num_layers=24, d_model=2048, sequence_length=1024
    )


def test_palm_540b_has_the_utilization_its_paper_reports() -> None:
    # PaLM, table 3 and appendix B: 238.3k tokens/s on 6144 TPU v4 chips of 275 TFLOP/s, 46.2 %.
    per_token = transformer_flops_per_token(
        540_350_000_000, num_layers=118, d_model=256 * 48, sequence_length=2048
    )
    ratio = mfu_ratio(flops_per_second=per_token * 238_300, peak=275e12, num_devices=6144)
    assert pytest.approx(0.462, abs=0.003) == ratio


def test_utilization_is_unknown_where_the_peak_is() -> None:
    assert None is mfu_ratio(flops_per_second=1.0, peak=None)
