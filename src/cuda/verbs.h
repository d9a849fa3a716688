// The kernels besides decode: loaded with the first plan, so that their first call may be within a capture.
#pragma once

namespace sparsemla::detail {

void prepare_convert_indices();  // convert_indices.cu
void prepare_merge_topk();       // merge_topk.cu
void prepare_records();          // records.cu
void prepare_mailbox();          // mailbox.cu
void prepare_merge();            // merge.cu
void prepare_merge_pushed();     // merge_pushed.cu
void prepare_copy_heads();       // copy_heads.cu

inline void prepare_verbs() {
    prepare_convert_indices();
    prepare_merge_topk();
    prepare_records();
    prepare_mailbox();
    prepare_merge();
    prepare_merge_pushed();
    prepare_copy_heads();
}

}  // namespace sparsemla::detail
