#!/usr/bin/env python3
"""Times the cpu kernel against the same work in NumPy with its OpenBLAS, float32, on the same cores in the same run.

    python3 -m venv .venv && .venv/bin/pip install numpy
    cmake -S . -B build -DCMAKE_BUILD_TYPE=Release -DSPARSEMLA_BENCH=ON && cmake --build build --target bench_cpu_decode
    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE .venv/bin/python bench/cpu_vs_numpy.py

NumPy's share: gather the records, dequantise by table, matmul, softmax, matmul, and the rounding to bf16. The two
alternate in rounds; the script prints medians, their ratio and how far the results are apart, and exits with 1 where
they disagree or where the library's memory exceeds inputs + outputs + 64 MiB (Linux only).
"""

import argparse
import json
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np

D_QK, D_V = 576, 512
SOFTMAX_SCALE = D_QK**-0.5
K_SCALE = 0.5


def e4m3_table():
    """Values of the 256 codes of OCP E4M3."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (mantissa + 8) * 2.0 ** (exponent - 10.0))
    magnitude = np.where((codes & 127) == 127, np.nan, magnitude)
    return np.where(codes >= 128, -magnitude, magnitude).astype(np.float32)


def to_codes(values, table):
    """Nearest E4M3 codes."""
    finite = np.nonzero(~np.isnan(table))[0]
    order = finite[np.argsort(table[finite], kind="stable")]
    midpoints = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(midpoints, values)].astype(np.uint8)


def make_step(rows, heads, width, seed, table):
    """A step whose attention is peaked: each query is near a few of its records."""
    rng = np.random.default_rng(seed)
    num_slots = rows * width * 2
    cache = to_codes(rng.standard_normal((num_slots, D_QK), dtype=np.float32), table)
    slots = np.stack([rng.permutation(num_slots)[:width] for _ in range(rows)]).astype(np.int32)
    query = rng.standard_normal((rows, heads, D_QK), dtype=np.float32)
    query += table[cache[slots[:, rng.integers(0, width, heads)]]]
    return {"query": to_codes(query, table), "cache": cache, "slots": slots}


def write_case(path, step):
    """The step as a case file (safetensors)."""
    metadata = {"record": "fp8", "record_bytes": str(D_QK), "page_size": "1", "softmax_scale": repr(SOFTMAX_SCALE),
                "k_scale": repr(K_SCALE)}
    header, offset = {"__metadata__": metadata}, 0
    for name, dtype in (("query", "F8_E4M3"), ("cache", "U8"), ("slots", "I32")):
        end = offset + step[name].nbytes
        header[name] = {"dtype": dtype, "shape": list(step[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in ("query", "cache", "slots"):
            file.write(step[name].tobytes())


def round_to_bf16(values):
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numpy_decode(step, table):
    """[rows, heads, 512] bf16 bits and [rows, heads] lse."""
    rows, heads, _ = step["query"].shape
    out = np.empty((rows, heads, D_V), np.uint16)
    lse = np.empty((rows, heads), np.float32)
    for row in range(rows):
        keys = table[step["cache"][step["slots"][row]]]
        query = table[step["query"][row]] * np.float32(SOFTMAX_SCALE * K_SCALE)
        scores = query @ keys.T
        largest = scores.max(axis=1, keepdims=True)
        scores -= largest
        np.exp(scores, out=scores)
        total = scores.sum(axis=1, keepdims=True)
        out[row] = round_to_bf16((scores @ keys[:, :D_V]) * (np.float32(K_SCALE) / total))
        lse[row] = (largest + np.log(total))[:, 0]
    return out, lse


class Library:
    """The benchmark program: decodes once for each line it is sent."""

    def __init__(self, program, case, out, threads):
        command = [str(program), str(case), str(out), "cpu"] + ([str(threads)] if threads else [])
        self.out = out
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.plan = self.process.stdout.readline().strip()

    def decode(self):
        """Wall and CPU time in microseconds."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        wall, cpu = self.process.stdout.readline().split()
        return float(wall), float(cpu)

    def finish(self, rows, heads):
        """out (bf16 bits), lse, and the growth of the peak resident set in bytes."""
        self.process.stdin.close()
        grown = int(self.process.stdout.readline())
        if self.process.wait() != 0:
            raise SystemExit("the benchmark program failed")
        data = pathlib.Path(self.out).read_bytes()
        out = np.frombuffer(data, np.uint16, rows * heads * D_V).reshape(rows, heads, D_V)
        lse = np.frombuffer(data, np.float32, rows * heads, out.nbytes).reshape(rows, heads)
        return out, lse, grown


def time_numpy(step, table):
    wall, cpu = time.perf_counter(), time.process_time()
    result = numpy_decode(step, table)
    return (1e6 * (time.perf_counter() - wall), 1e6 * (time.process_time() - cpu)), result


def compare(args, heads, table, folder):
    """Prints one line; returns whether the results agree and the memory is within its bound."""
    step = make_step(args.rows, heads, args.width, args.seed, table)
    case = folder / f"h{heads}.safetensors"
    write_case(case, step)
    library = Library(args.program, case, folder / "out.bin", args.threads)
    print(f"{heads:4} heads  {library.plan}")
    times = {"numpy": [], "library": []}
    for measured in [False] + [True] * args.rounds:
        time.sleep(args.pause)  # OpenBLAS keeps its threads spinning for a while
        library_time = library.decode()
        numpy_time, (expected, expected_lse) = time_numpy(step, table)
        if measured:
            times["library"].append(library_time)
            times["numpy"].append(numpy_time)
    out, lse, grown = library.finish(args.rows, heads)

    wall = {name: statistics.median(t[0] for t in samples) for name, samples in times.items()}
    cpu = {name: statistics.median(t[1] for t in samples) for name, samples in times.items()}
    flops = 2 * args.rows * heads * args.width * (D_QK + D_V)
    for name in ("numpy", "library"):
        fastest = min(t[0] for t in times[name])
        print(f"            {name:8} median {wall[name]:9.0f} us, fastest {fastest:9.0f} us, CPU time {cpu[name]:9.0f} us,"
              f" {flops / wall[name] / 1e3:6.1f} GFLOP/s")
    print(f"            ratio    {wall['numpy'] / wall['library']:.2f} (wall), {cpu['numpy'] / cpu['library']:.2f} (CPU time)")

    as_float = lambda bits: (bits.astype(np.uint32) << 16).view(np.float32)
    error = np.abs(as_float(out) - as_float(expected)).max() / np.abs(as_float(expected)).max()
    lse_error = np.abs(lse - expected_lse).max()
    allowed = out.nbytes + lse.nbytes + (64 << 20)  # the inputs were resident before
    agree = error < 2.0**-8 and lse_error < 1e-4
    print(f"            results  differ by {error:.1e} of the largest output (bf16: 3.9e-03), lse by {lse_error:.1e}:"
          f" {'agree' if agree else 'DISAGREE'}")
    print(f"            memory   peak grew by {grown / 2**20:.1f} MiB of {allowed / 2**20:.1f} allowed")
    return agree and grown <= allowed


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


def blas_name():
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=root / "build/bin/bench_cpu_decode")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before each round")
    parser.add_argument("--threads", type=int, default=0, help="of the library; 0: all cores")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{cpu_model()}, Python {sys.version.split()[0]}, NumPy {np.__version__}, {blas_name()}")
    print(f"{args.rows} rows x {args.width} columns, records of {D_QK} bytes, {args.rounds} rounds")
    table = e4m3_table()
    with tempfile.TemporaryDirectory() as folder:
        good = [compare(args, heads, table, pathlib.Path(folder)) for heads in args.heads]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
