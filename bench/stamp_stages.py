#!/usr/bin/env python3
"""Writes a CUDA source whose stage marks read the clock: stamp_stages.py SOURCE OUTPUT.

The headers with marks (MARKED, in the source's own folder) become part of the text. Exits unless there are 1 .. 32 marks,
one of them `entered`.

A mark is a comment `//@ name` (thread 0 of a CTA reads it) or `//@@ name` (the first thread of the helpers). Marks in a
loop keep the last time. The stamps lie in static shared memory and go to global memory at the marks named in LAST.
"""
import pathlib
import re
import sys

LAST = ("merged", "alone", "written")
MARKED = ("decode_latency_kernel.cuh", "decode_latency_multiply.cuh")
TYPES = """
namespace sparsemla::detail::latency {
namespace {
__device__ long long* stamps_of_sms;  // [SMs][128 places][32]
__device__ inline unsigned stamps_address() {
    __shared__ long long stamps[32];
    return static_cast<unsigned>(__cvta_generic_to_shared(stamps));
}
__device__ inline void stamp(int i, unsigned thread) {
    if (threadIdx.x != thread) return;
    long long cycles;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(stamps_address() + 8 * i), "l"(cycles) : "memory");
}
// By the first warp. A decode takes more than 4096 cycles: neighbours on an SM have places of their own.
__device__ inline void publish_stamps() {
    if (threadIdx.x >= 32 || stamps_of_sms == nullptr) return;
    __syncwarp();
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    long long cycles, entered;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(entered) : "r"(stamps_address() + 8 * ENTERED) : "memory");
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(cycles) : "r"(stamps_address() + 8 * threadIdx.x) : "memory");
    stamps_of_sms[(sm * 128 + (entered >> 12) % 128) * 32 + threadIdx.x] = cycles;
}
}  // namespace
}  // namespace sparsemla::detail::latency
"""
ACCESS = """
namespace sparsemla::detail::latency {
extern const char* const stage_names[];
extern const int num_stages;
const char* const stage_names[] = {NAMES};
const int num_stages = COUNT;
void set_stamps(long long* of_sms) {
    check_cuda(cudaMemcpyToSymbol(stamps_of_sms, &of_sms, sizeof of_sms), "cudaMemcpyToSymbol");
}
}  // namespace sparsemla::detail::latency
"""


def behind_includes(text, more):
    """With `more` behind the last #include."""
    last = max(text.rindex(line) + len(line) for line in re.findall(r"^#include .*$", text, flags=re.M))
    return text[:last] + "\n" + more + text[last:]


def main(source_path, output_path):
    names = []

    def mark(match):
        indent, who, name = match.groups()
        names.append(name)
        thread = "0" if who == "" else "32 * multiplying_warps"
        text = f"{indent}stamp({len(names) - 1}, {thread});"
        return text + " publish_stamps();" if name in LAST else text

    source = pathlib.Path(source_path)
    text = source.read_text()
    for marked in MARKED:
        header = (source.parent / marked).read_text()
        includes = "\n".join(re.findall(r"^#include .*$", header, flags=re.M))
        body = re.sub(r"^#(?:include .*|pragma once)$", "", header, flags=re.M)
        text = behind_includes(text.replace(f'#include "cuda/{marked}"', includes), body)
    text = re.sub(r"^( *)//@(@?) (\w+)$", mark, text, flags=re.M)
    if "entered" not in names or len(names) > 32:
        sys.exit(f"stamp_stages.py: need 1 .. 32 marks in {source_path}, 'entered' among them, got {names}")
    text = behind_includes(text, TYPES.replace("ENTERED", str(names.index("entered"))))
    quoted = ", ".join(f'"{name}"' for name in names)
    with open(output_path, "w") as file:
        file.write(text + ACCESS.replace("NAMES", quoted).replace("COUNT", str(len(names))))


if __name__ == "__main__":
    main(*sys.argv[1:])
