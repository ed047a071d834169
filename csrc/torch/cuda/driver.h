// Functions of the CUDA driver, looked up by name through the runtime: libcuda is not linked, and a
// driver that lacks a function is an error only where that function is called.
#pragma once
#include <cuda.h>

namespace pycollect {

// Returns a function of the driver in its version of CUDA 11.7. Throws std::runtime_error if the
// driver has no function of this name.
void* driver_entry(const char* name);
template <class Function>
Function driver_function(const char* name) {
  return reinterpret_cast<Function>(driver_entry(name));
}

// Throws std::runtime_error with the driver's name for the error of `call`, unless it succeeded.
void check_driver(CUresult result, const char* call);

// Looks the function up and calls it. For rare calls, because it looks it up every time.
template <class Function, class... Arguments>
void call_driver(const char* name, Arguments... arguments) {
  check_driver(driver_function<Function>(name)(arguments...), name);
}

}  // namespace pycollect
