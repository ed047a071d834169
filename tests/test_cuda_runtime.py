"""csrc/torch/cuda/api.cpp, with some of CUDA's functions replaced; needs CUDA's headers.

The other functions of CUDA and torch are missing, and the test does not call them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCE = f"""
#include "{ROOT}/csrc/torch/cuda/api.cpp"
#include "{ROOT}/csrc/torch/cuda/api.h"

namespace {{
cudaError_t answer = cudaSuccess, last = cudaSuccess;
}}
extern "C" {{
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {{
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t*,
                                        const cudaGraphNode_t**, size_t*) {{
#endif
  *status = cudaStreamCaptureStatusActive;  // not specified if it fails
  *id = 7;
  return last = answer;
}}
cudaError_t cudaGetLastError() {{ return std::exchange(last, cudaSuccess); }}
const char* cudaGetErrorString(cudaError_t) {{ return "failed"; }}
const char* cudaGetErrorName(cudaError_t) {{ return "cudaError"; }}
}}

extern "C" {{
int capture_id(int error) try {{
  answer = static_cast<cudaError_t>(error);
  return pycollect::cuda_api().capture_id({{0, nullptr}});
}} catch (const std::runtime_error&) {{
  return -1;
}}
int last_error() {{ return last; }}
}}
"""
IMPLICIT = 906  # cudaErrorStreamCaptureImplicit
INVALIDATED = 901  # cudaErrorStreamCaptureInvalidated


@pytest.mark.slow
def test_the_legacy_stream_is_in_no_capture_while_a_blocking_stream_is(tmp_path: Path) -> None:
    """CUDA answers with an error instead, which torch must not find after its next launch."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (toolkit / "include" / "cuda_runtime_api.h").exists():
        pytest.skip(f"no CUDA headers in CUDA_HOME, {toolkit}")
    if not (Path(torch.__file__).parent / "include" / "c10" / "cuda").exists():
        pytest.skip("this torch has no headers for CUDA")
    (tmp_path / "probe.cpp").write_text(SOURCE)
    includes = [Path(torch.__file__).parent / "include", toolkit / "include"]
    flags = ["-std=c++20", "-fPIC", "-shared", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    flags += ["-Wl,-Bsymbolic"]  # not the CUDA that torch has loaded
    flags += [f"-isystem{path}" for path in includes]
    command = [*shlex.split(os.environ.get("CXX", "g++")), *flags, "-o", "probe.so", "probe.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    api = ctypes.CDLL(str(tmp_path / "probe.so"), mode=os.RTLD_LAZY)
    assert api.capture_id(0) == 7
    assert api.capture_id(IMPLICIT) == 0
    assert api.last_error() == 0
    assert api.capture_id(INVALIDATED) == -1
