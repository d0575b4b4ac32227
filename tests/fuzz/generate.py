#!/usr/bin/env python3
"""Writes the corpus: small files, right and wrong, from which the fuzzer starts."""
import json
import os
import struct

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")
sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


def write(name, data):
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data)


def file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


at, every = 0, {}
for dtype, size in sizes.items():
    every[dtype.lower()] = entry(dtype, [2, 3], at, at + 6 * size)
    at += 6 * size
write("every_dtype", file(every, bytes(range(at % 256)) + bytes(at - at % 256)))
write("nothing", file({}))
write("spaces", file(b"{}      "))
write("scalar", file({"a": entry("F32", [], 0, 4)}, b"abcd"))
write("empty_tensors", file({"a": entry("F32", [0], 0, 0), "b": entry("U8", [3, 0, 2], 0, 0)}))
write("rank_8", file({"a": entry("U8", [1, 1, 1, 2, 1, 1, 1, 1], 0, 2)}, b"ab"))
write("foreign", file({"a": entry("F4", [4], 0, 2), "b": entry("X1", [9], 2, 3)}, b"abc"))
write("metadata", file({"__metadata__": {"format": "pt", "k": "\u00e9"}, "a": entry("U8", [1], 0, 1)}, b"a"))
hashed = {"moe.format": "1", "moe.version": "0.1.0", "moe.xxh3:a": "e6c632b61e964e1f"}
write("hashes", file({"__metadata__": hashed, "a": entry("U8", [1], 0, 1)}, b"a"))
write("stray_hash", file({"__metadata__": {"moe.xxh3:gone": "0123456789abcdef"}, "a": entry("U8", [1], 0, 1)}, b"a"))
write("bad_hash", file({"__metadata__": {"moe.xxh3:a": "xyz"}, "a": entry("U8", [1], 0, 1)}, b"a"))
write("later_format", file({"__metadata__": {"moe.format": "2"}}))
write("hole", file({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"abc"))
write("overlap", file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc"))
write("duplicate", file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"a"))
write("long_header", file({}, length=100000000))
write("longer_header", file({}, length=(1 << 64) - 1))
write("short", b"\2\0\0")
write("huge", file({"a": entry("F32", [1 << 40, 1 << 40], 0, 4)}, b"abcd"))
write("negative", file({"a": entry("F32", [-1], -4, 0)}, b"abcd"))
write("floats", file(b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1e0]}}', b"a"))
write("past_the_end", file({"a": entry("F32", [1], 0, 4)}, b"abc"))
write("deep", file(b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"))
write("nul", file(b'{"a\\u0000":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"))
write("not_utf8", file(b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"))
write("arrays", file(b'{"a":[' + b"[]," * 200 + b"[]]}"))
write("index", b'{"metadata":{"total_size":3,"o":{"p":[1,2.5,null]}},"weight_map":{"a":"x.safetensors","b":"y"}}')
write("index_elsewhere", b'{"weight_map":{"a":"../x.safetensors"}}')
write("raw", struct.pack("<q2q6f2q2f", 2, 3, 2, .1, .2, .3, .4, .5, .6, 2, 1, .7, .8))
write("raw_nothing", struct.pack("<q", 0))
write("raw_huge", struct.pack("<qqq", 1, 1 << 62, 1 << 62))
write("raw_many", struct.pack("<q", 1 << 60) + bytes(64))
