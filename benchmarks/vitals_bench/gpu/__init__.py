"""Checks and measurements on NVIDIA GPUs: `make gpu-check`. Without a GPU, CUDA parts are skipped.

Each part runs in its own process, because an error of CUDA poisons its process. The modules import
the public API of Vitals and torch, so the check also runs next to an installed wheel.
"""
