"""`make test-avx2`: every library that could use AVX512 has heard that it may not."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

pytestmark = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") != "avx2", reason="these are the variables of test-avx2"
)


def test_torch_numpy_openblas_and_numba():
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    chosen = np.lib.introspect.opt_func_info(func_name="^(log|exp|power)$")
    ways = {way["current"] for name in chosen.values() for way in name.values()}
    assert ways and not any("V4" in way or "AVX512" in way for way in ways)
    blas = [b["architecture"] for b in threadpool_info() if b["internal_api"] == "openblas"]
    assert blas and {*blas} <= {"Haswell", "Zen"}
    double = numba.njit("void(float64[::1])")(_double)
    (code,) = double.inspect_asm().values()
    assert "ymm" in code and "zmm" not in code


def _double(x):
    for i in range(x.size):
        x[i] *= 2


def test_onednn():
    code = "import torch; torch.conv2d(torch.ones(8, 8, 9, 9), torch.ones(8, 8, 3, 3))"
    call = [sys.executable, "-c", code]
    env = os.environ | {"ONEDNN_VERBOSE": "1"}
    told = subprocess.run(call, env=env, capture_output=True, text=True, check=True).stdout
    assert "jit:avx2" in told and "avx512" not in told
