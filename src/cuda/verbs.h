// The kernels besides decode: loaded with the first plan, so that their first call may be within a capture.
#pragma once

namespace sparsemla::detail {

void prepare_convert_indices();  // convert_indices.cu
void prepare_records();          // records.cu

inline void prepare_verbs() {
    prepare_convert_indices();
    prepare_records();
}

}  // namespace sparsemla::detail
