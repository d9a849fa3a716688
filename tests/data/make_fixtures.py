#!/usr/bin/env python3
"""Writes the fixtures beside this script and the seeds of fuzz/corpus. Standard library only; deterministic.

Answers are computed here in float64 from the stored bytes by the byte layouts, apart from the library.
"""
import json
import math
import pathlib
import random
import struct

HERE = pathlib.Path(__file__).resolve().parent
CORPUS = HERE.parent.parent / "fuzz" / "corpus"

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e4m3(code):
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def bf16(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def ue8m0(code):
    return 2.0 ** (code - 127)


def random_e4m3(rng, n):
    """Codes of magnitude 2^-5 .. 1.9, either sign."""
    return bytes(rng.randrange(2) << 7 | rng.randrange(2, 8) << 3 | rng.randrange(8) for _ in range(n))


def random_bf16(rng, n):
    words = [rng.randrange(2) << 15 | rng.randrange(122, 128) << 7 | rng.randrange(128) for _ in range(n)]
    return struct.pack(f"<{n}H", *words)


def bf16_values(raw):
    return [bf16(word) for word in struct.unpack(f"<{len(raw) // 2}H", raw)]


def e2m1_values(raw):
    return [E2M1[nibble] for byte in raw for nibble in (byte & 15, byte >> 4)]


def scaled(values, scales):
    group = len(values) // len(scales)
    return [value * scales[i // group] for i, value in enumerate(values)]


# Each writer gives (data, scales, values): one token's two planes, and its dequantised dimensions.
def make_bf16(rng):
    raw = random_bf16(rng, 576)
    return raw, b"", bf16_values(raw)


def make_flat(dims):
    def make(rng):
        raw = random_e4m3(rng, dims)
        return raw, b"", [e4m3(code) for code in raw]

    return make


def make_ds_mla(rope_dims):
    def make(rng):
        latent, rope = random_e4m3(rng, 512), random_bf16(rng, rope_dims)
        scales = struct.pack("<4f", *(rng.uniform(0.3, 1.7) for _ in range(4)))
        values = scaled([e4m3(code) for code in latent], struct.unpack("<4f", scales)) + bf16_values(rope)
        return latent + scales + rope, b"", values

    return make


def make_v4(rng):
    latent, rope = random_e4m3(rng, 448), random_bf16(rng, 64)
    scales = bytes(rng.randrange(125, 129) for _ in range(7))
    values = scaled([e4m3(code) for code in latent], [ue8m0(code) for code in scales]) + bf16_values(rope)
    return latent + rope, scales + b"\0", values


def make_v41(rng):
    latent = random_e4m3(rng, 512)
    scales = bytes(rng.randrange(125, 129) for _ in range(16))
    return latent, scales, scaled([e4m3(code) for code in latent], [ue8m0(code) for code in scales])


def make_nvfp4_v41(rng):
    codes = rng.randbytes(256)
    scales = bytes(code & 0x7F for code in random_e4m3(rng, 32))
    return codes, scales, scaled(e2m1_values(codes), [e4m3(code) for code in scales])


def make_nvfp4_ds_mla(rng):
    codes, rope = rng.randbytes(256), random_e4m3(rng, 64)
    scales = bytes(code & 0x7F for code in random_e4m3(rng, 32))
    stored = bytearray(32)
    for block in range(32):
        stored[8 * (block & 3) + (block >> 2)] = scales[block]
    values = scaled(e2m1_values(codes), [e4m3(code) for code in scales]) + [e4m3(code) for code in rope]
    return codes + rope + bytes(stored), b"", values


RECORDS = {
    "bf16": ("bf16", make_bf16),
    "fp8_576": ("fp8", make_flat(576)),
    "fp8_512": ("fp8", make_flat(512)),
    "fp8_ds_mla": ("fp8_ds_mla", make_ds_mla(64)),
    "fp8_ds_mla_norope": ("fp8_ds_mla_norope", make_ds_mla(0)),
    "fp8_v4": ("fp8_v4", make_v4),
    "fp8_v41": ("fp8_v41", make_v41),
    "nvfp4_v41": ("nvfp4_v41", make_nvfp4_v41),
    "nvfp4_ds_mla": ("nvfp4_ds_mla", make_nvfp4_ds_mla),
}
PLANAR = {"fp8_v4", "fp8_v41", "nvfp4_v41"}


def make_cache(rng, record, pages, page_size, pad_bytes=0):
    """The cache tensor, the values of each slot, and metadata."""
    name, make = RECORDS[record]
    tokens = [make(rng) for _ in range(pages * page_size)]
    record_bytes = len(tokens[0][0]) + len(tokens[0][1])
    raw = b""
    for page in range(pages):
        part = tokens[page * page_size : (page + 1) * page_size]
        raw += b"".join(token[0] for token in part) + b"".join(token[1] for token in part) + b"\xff" * pad_bytes
    if record in PLANAR:
        tensor = ("U8", [pages, page_size * record_bytes + pad_bytes], raw)
    elif record == "bf16":
        tensor = ("BF16", [pages, page_size, record_bytes // 2], raw)
    else:
        tensor = ("U8", [pages, page_size, record_bytes], raw)
    metadata = {"record": name, "record_bytes": str(record_bytes), "page_size": str(page_size)}
    return tensor, [token[2] for token in tokens], metadata


def attend(query, sources, softmax_scale, q_scale, out_scale, sink):
    """Output and lse of one row and head. Sources: (k_scale, [values of an active column])."""
    scores, values = [], []
    for k_scale, columns in sources:
        for column in columns:
            dot = math.fsum(a * b for a, b in zip(query, column))
            scores.append(softmax_scale * q_scale * k_scale * dot)
            values.append([k_scale * v for v in column[:512]])
    if not scores:
        return [0.0] * 512, -math.inf
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    bottom = total + (math.exp(sink - top) if sink is not None else 0.0)
    out = [out_scale * math.fsum(w * v[d] for w, v in zip(weights, values)) / bottom for d in range(512)]
    return out, top + math.log(total)


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def ints(values):
    return struct.pack(f"<{len(values)}i", *values)


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


def write(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    size = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
    for name, (dtype, shape, raw) in sorted(tensors.items(), key=lambda item: (-size[item[1][0]], item[0])):
        assert len(raw) == size[dtype] * math.prod(shape), name
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def make_case(path, record, seed, *, extra=None, rows=2, heads=1, answers=True, pad_bytes=0, sinks=False, k_scale=1.0):
    rng = random.Random(seed)
    names = [record] + ([extra] if extra else [])
    tensors, metadata, sources = {}, {}, []
    scales = {"softmax_scale": 0.0625, "q_scale": 0.5, "k_scale": k_scale}
    for name, prefix in zip(names, ("", "extra_")):
        cache, values, about = make_cache(rng, name, 2, 2, pad_bytes)
        tensors[prefix + "cache"] = cache
        metadata.update({prefix + key: value for key, value in about.items()})
        if pad_bytes:
            metadata[prefix + "page_stride_bytes"] = str(cache[1][1])
        width = 4
        slots = [[rng.choice([-1, 0, 1, 2, 3]) for _ in range(width)] for _ in range(rows)]
        slots[0][0] = 1
        counts = [rng.randrange(2, width + 1) if row == 0 else rng.randrange(width + 1) for row in range(rows)]
        tensors[prefix + "slots"] = ("I32", [rows, width], ints(sum(slots, [])))
        tensors[prefix + "counts"] = ("I32", [rows], ints(counts))
        own_scale = f32(k_scale) if name.startswith("fp8_5") else 1.0
        sources.append((own_scale, values, slots, counts))
    d_qk = len(sources[0][1][0])
    typed = random_bf16 if record == "bf16" else random_e4m3
    query = [typed(rng, d_qk) for _ in range(rows * heads)]
    read = bf16_values if record == "bf16" else lambda raw: [e4m3(code) for code in raw]
    tensors["query"] = ("BF16" if record == "bf16" else "F8_E4M3", [rows, heads, d_qk], b"".join(query))
    metadata.update({key: repr(value) for key, value in scales.items() if key != "k_scale" or value != 1.0})
    metadata["lse"] = "natural"
    sink = [f32(rng.uniform(-1, 1)) for _ in range(heads)] if sinks else [None] * heads
    if sinks:
        tensors["sinks"] = ("F32", [heads], floats(sink))
    if answers:
        out, lse = [], []
        for row in range(rows):
            active = [
                (scale, [values[s] for s in slots[row][: counts[row]] if s >= 0])
                for scale, values, slots, counts in sources
            ]
            for head in range(heads):
                result = attend(read(query[row * heads + head]), active, 0.0625, 0.5, 1.0, sink[head])
                out += result[0]
                lse.append(result[1])
        tensors["expected.out"] = ("F32", [rows, heads, 512], floats(out))
        tensors["expected.lse"] = ("F32", [rows, heads], floats(lse))
    write(path, tensors, metadata)


def make_token_ids(path):
    """Two ranks, interleave 1; this is rank 1. Ids 1 and 5 are its first and third token, 2 belongs to rank 0."""
    rng = random.Random(100)
    cache, _, metadata = make_cache(rng, "fp8_576", 3, 2)
    tensors = {
        "cache": cache,
        "query": ("F8_E4M3", [2, 1, 576], random_e4m3(rng, 2 * 576)),
        "token_ids": ("I32", [2, 4], ints([1, 2, 5, -1, 7, 99, 3, 1])),
        "block_table": ("I32", [2, 2], ints([2, 0, 1, 2])),
        "request_of_row": ("I32", [2], ints([0, 1])),
    }
    metadata |= {"softmax_scale": "0.0625", "k_scale": "0.5", "world": "2", "rank": "1", "interleave": "1"}
    write(path, tensors, metadata)


def make_one_list(path):
    """One list and one count over both sources: columns 0, 1 address source 0, the others source 1."""
    rng = random.Random(101)
    first, first_values, metadata = make_cache(rng, "fp8_v4", 1, 2)
    extra, extra_values, about = make_cache(rng, "nvfp4_v41", 2, 2)
    metadata.update({"extra_" + key: value for key, value in about.items()})
    metadata |= {"softmax_scale": "0.0625", "first_width": "2", "lse": "natural"}
    slots, counts = [[1, 0, 3, -1, 2], [0, 1, 1, 2, 3]], [4, 1]
    query = [random_e4m3(rng, 512) for _ in range(2)]
    out, lse = [], []
    for row in range(2):
        active = slots[row][: counts[row]]
        columns = [(first_values if i < 2 else extra_values)[s] for i, s in enumerate(active) if s >= 0]
        result = attend([e4m3(code) for code in query[row]], [(1.0, columns)], 0.0625, 1.0, 1.0, None)
        out += result[0]
        lse.append(result[1])
    tensors = {
        "cache": first,
        "extra_cache": extra,
        "query": ("F8_E4M3", [2, 1, 512], b"".join(query)),
        "slots": ("I32", [2, 5], ints(sum(slots, []))),
        "counts": ("I32", [2], ints(counts)),
        "expected.out": ("F32", [2, 1, 512], floats(out)),
        "expected.lse": ("F32", [2, 1], floats(lse)),
    }
    write(path, tensors, metadata)


def main():
    CORPUS.mkdir(parents=True, exist_ok=True)
    for seed, record in enumerate(RECORDS):
        k_scale = 0.75 if record.startswith("fp8_5") else 1.0
        make_case(CORPUS / f"{record}.safetensors", record, seed, rows=1, answers=False, k_scale=k_scale)
    make_case(CORPUS / "two_lists.safetensors", "fp8_v4", 50, extra="nvfp4_v41", rows=1, answers=False, sinks=True)
    make_token_ids(CORPUS / "token_ids.safetensors")

    for seed, record in enumerate(["bf16", "fp8_576", "fp8_ds_mla", "nvfp4_ds_mla"]):
        k_scale = 0.75 if record.startswith("fp8_5") else 1.0
        make_case(HERE / f"{record}.safetensors", record, 10 + seed, k_scale=k_scale, sinks=record == "bf16")
    make_case(HERE / "fp8_v4_padded_pages.safetensors", "fp8_v4", 20, pad_bytes=48)
    make_case(HERE / "two_sources.safetensors", "fp8_v41", 21, extra="fp8_512", k_scale=1.0, sinks=True)
    make_token_ids(HERE / "token_ids.safetensors")
    make_one_list(HERE / "one_list.safetensors")


if __name__ == "__main__":
    main()
