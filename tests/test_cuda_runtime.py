"""csrc/torch/cuda/api.cpp, with CUDA and torch replaced by a few functions; needs CUDA's headers.

The functions of CUDA that a test does not replace are missing, and no test calls them.
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
cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
int current = 0, loads = 0;
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
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {{
  std::swap(mode, *other);
  return cudaSuccess;
}}
}}
namespace c10::cuda {{
cudaError_t GetDevice(DeviceIndex* device) {{ return *device = current, cudaSuccess; }}
cudaError_t SetDevice(DeviceIndex device, bool) {{ return current = device, cudaSuccess; }}
cudaError_t MaybeSetDevice(DeviceIndex device) {{ return current = device, cudaSuccess; }}
}}
namespace pycollect::cuda {{
void load_kernels(DType, ReduceOp) {{
  loads += mode == cudaStreamCaptureModeRelaxed && current == 1 ? 1 : 100;
}}
}}

extern "C" {{
int capture_id(int error) try {{
  answer = static_cast<cudaError_t>(error);
  return pycollect::cuda_api().capture_id({{0, nullptr}});
}} catch (const std::runtime_error&) {{
  return -1;
}}
int last_error() {{ return last; }}
int loads_on_device_1(int times) {{
  for (int i = 0; i < times; ++i)
    pycollect::cuda_api().load(1, pycollect::DType::f32, pycollect::ReduceOp::sum);
  return current == 0 && mode == cudaStreamCaptureModeGlobal ? loads : -1;
}}
}}
"""
IMPLICIT = 906  # cudaErrorStreamCaptureImplicit
INVALIDATED = 901  # cudaErrorStreamCaptureInvalidated


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (toolkit / "include" / "cuda_runtime_api.h").exists():
        pytest.skip(f"no CUDA headers in CUDA_HOME, {toolkit}")
    if not (Path(torch.__file__).parent / "include" / "c10" / "cuda").exists():
        pytest.skip("this torch has no headers for CUDA")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "probe.cpp").write_text(SOURCE)
    includes = [Path(torch.__file__).parent / "include", toolkit / "include"]
    flags = ["-std=c++20", "-fPIC", "-shared", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    flags += ["-Wl,-Bsymbolic"]  # not the CUDA that torch has loaded
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        *flags,
        *(f"-isystem{path}" for path in includes),
    ]
    subprocess.run([*command, "-o", "probe.so", "probe.cpp"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "probe.so"), mode=os.RTLD_LAZY)


@pytest.mark.slow
def test_the_legacy_stream_is_in_no_capture_while_a_blocking_stream_is(api: ctypes.CDLL) -> None:
    """CUDA answers with an error instead, which torch must not find after its next launch."""
    assert api.capture_id(0) == 7
    assert api.capture_id(IMPLICIT) == 0
    assert api.last_error() == 0
    assert api.capture_id(INVALIDATED) == -1


@pytest.mark.slow
def test_kernels_are_loaded_once_for_a_device_in_relaxed_mode(api: ctypes.CDLL) -> None:
    assert api.loads_on_device_1(2) == 1
