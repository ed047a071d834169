#include "float8_specials.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <limits>

namespace pycollect {
namespace {

Float8Specials::Codes probe(at::ScalarType type) {
  float values[]{1e6F, std::numeric_limits<float>::infinity(),
                 std::numeric_limits<float>::quiet_NaN()};
  const at::Tensor bytes = at::from_blob(values, {3}, at::kFloat).to(type).view(at::kByte);
  const auto* b = bytes.const_data_ptr<uint8_t>();
  return {b[0], b[1], b[2]};
}

}  // namespace

const Float8Specials& float8_specials() {
  static const Float8Specials rounding{probe(at::kFloat8_e4m3fn), probe(at::kFloat8_e5m2)};
  return rounding;
}

}  // namespace pycollect
