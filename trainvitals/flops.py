"""Peak throughput of a device, and FLOPs of a training step: the two parts of MFU.

Peaks are dense (no structured sparsity), in FLOP/s, as the vendor's data sheet gives them. Where a
sheet prints only the value "with sparsity", the dense one is half of it. The names are those the
driver gives (``NVIDIA H100 80GB HBM3`` is the SXM board). Sources:

- B300, B200: HGX data sheets, an eighth of the board (36 PFLOPS bf16 with sparsity, 600 TFLOPS
  fp32)
- GB200: GB200 NVL72 data sheet, a 72nd of the rack (360 PFLOPS bf16 with sparsity, 5,760 TFLOPS
  fp32)
- MI300X, MI325X: AMD's data sheets (matrix bf16, vector fp32)
- H20: no public data sheet; the figures that training libraries agree on
- H200, H100 SXM, H100 PCIe, H100 NVL: H100 and H200 Tensor Core GPU data sheets
- A100: A100 Tensor Core GPU data sheet; A800 and H800 are left out: reports differ
- L40S, L40, L4, A10, A40: their data sheets; RTX 4090 and 3090: Ada and Ampere GA102 white papers
  (tensor peak with FP32 accumulation, which training uses)
- V100, T4: Volta and Turing white papers; neither has bf16

A name that is missing here gives None: a wrong peak is worse than none.
"""

import re
from typing import Literal, NamedTuple

Precision = Literal["bf16", "fp16", "fp32"]


class _Peak(NamedTuple):
    """TFLOP/s; ``fp32`` without tensor cores (TF32 is a choice of the user's, not of the type)."""

    bf16: float | None
    fp16: float | None
    fp32: float | None


# The first match wins, so the more specific name comes first.
_PEAKS: tuple[tuple[str, _Peak], ...] = (
    (r"\b(B300|B200)\b", _Peak(2250.0, 2250.0, 75.0)),
    (r"\bGB200\b", _Peak(2500.0, 2500.0, 80.0)),
    (r"\bMI3(00|25)X\b", _Peak(1307.4, 1307.4, 163.4)),
    (r"\bH20$", _Peak(148.0, 148.0, 44.0)),
    (r"\bH200$", _Peak(989.4, 989.4, 66.9)),
    (r"\bH200 NVL\b", _Peak(835.5, 835.5, 60.0)),
    (r"\bH100 PCIe\b", _Peak(756.5, 756.5, 51.2)),
    (r"\bH100 NVL\b", _Peak(835.5, 835.5, 60.0)),
    (r"\bH100 (SXM5?|80GB HBM3)$", _Peak(989.4, 989.4, 66.9)),
    (r"\bA100\b", _Peak(312.0, 312.0, 19.5)),
    (r"\bL40S\b", _Peak(362.05, 362.05, 91.6)),
    (r"\bL40\b", _Peak(181.05, 181.05, 90.5)),
    (r"\bL4\b", _Peak(121.0, 121.0, 30.3)),
    (r"\bA40\b", _Peak(149.7, 149.7, 37.4)),
    (r"\bA10\b", _Peak(125.0, 125.0, 31.2)),
    (r"\bV100S\b", _Peak(None, 130.0, 16.4)),
    (r"\bV100-SXM[23]\b", _Peak(None, 125.0, 15.7)),
    (r"\bV100-PCIE\b", _Peak(None, 112.0, 14.0)),
    (r"\bT4$", _Peak(None, 65.0, 8.1)),
    (r"\bRTX 4090$", _Peak(165.2, 165.2, 82.6)),
    (r"\bRTX 3090$", _Peak(71.0, 71.0, 35.6)),
)


def peak_flops(device_name: str, precision: Precision = "bf16") -> float | None:
    """Return a device's dense peak in FLOP/s, for the metric MFU; None if it is unknown.

    ``device_name`` is the name from ``torch.cuda.get_device_name()`` or NVML. A slice of a GPU
    (MIG) has another peak and gives None.
    """
    if "MIG" in device_name:
        return None
    for pattern, peak in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            tera: float | None = getattr(peak, precision, None)
            return None if tera is None else tera * 1e12
    return None


def transformer_flops_per_token(
    num_params: int, *, num_layers: int = 0, d_model: int = 0, sequence_length: int = 0
) -> float:
    """Return a token's model FLOPs for the metric MFU: ``6 N + 12 L d s`` (PaLM, appendix B).

    ``num_params`` without the position embeddings; forward and backward, attention not causal, no
    recomputation: model FLOPs, not hardware FLOPs. Without layers it is ``6 N`` alone.
    """
    return 6.0 * num_params + 12.0 * num_layers * d_model * sequence_length


def mfu_ratio(*, flops_per_second: float, peak: float | None, num_devices: int = 1) -> float | None:
    """Return the metric MFU: model FLOPs utilization, 0 to 1; None if the peak is unknown."""
    if peak is None or peak <= 0 or num_devices < 1:
        return None
    return flops_per_second / (peak * num_devices)
