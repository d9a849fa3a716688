// Is a kernel's output right? Bounds computed from the oracle by the formulas of docs/numerics.md; nothing is tuned.
#pragma once

#include <cstdint>
#include <string>

#include "harness/oracle.h"
#include "sparsemla/decode.h"

namespace sparsemla::harness {

/// What a schedule may lose.
struct Accuracy {
    double u_p = 0;              ///< relative rounding of P
    double u_sub = 0;            ///< absolute rounding of P, in units of the anchor's weight
    double u_sum = 0x1p-24;      ///< one addition of the sums over columns: FP32; 2^-53 for float64
    double u_acc = 0;            ///< accumulation in P*V beyond FP32
    double u_score = 0x1p-20;    ///< of score_scale: effect of score error on the weights
    double lse_base = 1e-5;      ///< natural units
    double lse_score = 0x1p-21;  ///< of score_scale
    std::int64_t chunk = 64;     ///< columns summed in sequence
    std::int64_t splits = 1;
};

Accuracy accuracy_of(const Schedule& schedule);

/// One comparison of [rows, heads] outputs with the oracle.
struct Verdict {
    bool pass = true;
    double worst_ratio = 0;                   ///< largest |out - e| / bound over all elements; infinite: an exact rule
    std::int64_t row = 0, head = 0, dim = 0;  ///< where
    double got = 0, expected = 0, bound = 0;
    double worst_rms_ratio = 0;  ///< largest RMS / its bound; 0 where the RMS rule does not apply
    double rms = 0;              ///< over all elements: sqrt(mean((out - e)^2))
    double lse_error = 0;        ///< largest |lse - e|, natural
    double lse_ratio = 0;        ///< largest |lse - e| / bound
    std::string problem;         ///< empty, or one sentence: which rule failed, where, got, expected, bound
};

/// `out` bf16 or f32 [>= rows, >= heads, 512], `lse` f32 [>= rows, >= heads] in `lse_base`; either may be absent. CPU
/// memory.
/// `uncorrelated`: the data is random enough for the RMS rule (gen's is; tied scores are not).
/// An empty row must be the bits of +0 and -inf. Where NaN is expected there must be a NaN; where an infinity is, the
/// same one or NaN (a weight that P's format rounds to zero, times infinity).
Verdict compare(const Oracle& oracle, ConstTensor out, ConstTensor lse, LseBase lse_base, const Accuracy& accuracy,
                bool uncorrelated);

}  // namespace sparsemla::harness
