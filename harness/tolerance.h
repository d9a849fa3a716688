// Is a kernel's output right? Bounds computed from the oracle by the formulas of docs/numerics.md; nothing is tuned.
//
// Elements. With w_c the oracle's weight of column c, A = sum |w_c v_c|, V = sum |v_c| in units of the anchor's weight,
// e the expected value and n the row's active columns:
//
//     |out - e| <= (1 + u_out) * ((u_p + u_acc + u_s + n * 2^-24) * A + u_sub * V) + u_out * |e| + tiny
//
//   u_p     half a step of P's format relative to P: 2^-4 e4m3, 2^-11 f16, 2^-8 bf16 (eight significant bits)
//   u_sub   half a step of P's subnormals, 2^-10 / p_scale e4m3 and 2^-25 / p_scale f16; at least 2^-126, because the
//           power of two may flush below FP32's normal range. The anchor's weight is at most that of the row's maximum.
//   u_acc   accumulation in P*V beyond FP32
//   u_s     a score error of at most t changes a weight by a factor in e^(-2t) .. e^(2t), through its own power and
//           through the sum: u_s = e^(2t) - 1. t = 2^-21 * score_scale, where score_scale = max_c(scale * sum |q k|),
//           is eight FP32 roundings of full size: four of the scale factors, four for a sum of exact products in
//           blocks of up to 64, whose roundings grow with the square root of their number.
//   n*2^-24 the two FP32 sums over columns, P*V and l. In chunks neither has more than n / 2 roundings in sequence;
//           shorter rows have their slack in the anchor's P, which is exact.
//   u_out   the output's only rounding: 2^-8 bf16, 2^-24 f32. It is of out, not of e: hence the factor 1 + u_out.
//   tiny    2^-126 * max(1, k_scale * |out_scale|): products and results below FP32's normal range may be flushed.
//
// RMS, for uncorrelated data: per (row, head), over the 512 dimensions d,
//
//     rms_d((out - e) / b_d) <= 1        b_d = 1.5 * (  (u_p / sqrt(3) + u_acc + u_s) * sqrt(sum (w_c v_cd)^2)
//                                                     + u_sub / sqrt(3) * sqrt(sum v_cd^2 in the anchor's unit)
//                                                     + u_out / sqrt(3) * |e_d|)
//
//   A rounding error is uniform within its half step, hence sqrt(3), and independent of the others; columns that repeat
//   a record round alike and count as one. The quotient is taken before the mean: a few channels of real data are 10 to
//   50 times larger than the rest, and an RMS of plain errors is the error of those few, which exceeds its own
//   deviation by 1.5 every so often. 2^-8 / sqrt(3) rather than 2^-9: a row with one column has 8 distinct mantissas,
//   too few for the mean over mantissas that 2^-9 presumes.
//
// LSE:
//
//     |lse - e| <= 1e-5 + 2^-21 * score_scale + max(0, longest - 160) * 2^-24
//
//   1e-5 holds the rounding of the LSE (ln of thousands), of the power of two and of 160 FP32 additions in sequence;
//   the longest chain of a schedule is its chunk, then three roundings a chunk of the split, then its splits. A float64
//   kernel rounds the LSE once: 2^-20 + 2^-23 * score_scale. LSEs to base two are compared in natural units.
//
// Not bounded: rows and heads where a sum of |q k| or |v| passes 2^110 may overflow in FP32 and give anything.
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
