// Which kernels belong to which kind of device.
#pragma once

#include <string>
#include <vector>

#include "sparsemla/decode.h"

namespace sparsemla::harness {

/// A problem that every kernel of the kind takes if it takes anything: flat records, one tile of heads.
Problem smallest_problem(Device device);

/// Names of the kernels that run on this kind of device, in order of preference. What another kind's kernel says about
/// the device is the same for all of them, and no news.
std::vector<std::string> kernels_on(Device::Kind kind);

}  // namespace sparsemla::harness
