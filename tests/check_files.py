"""Files of libmoe in Python's safetensors, and the other way round, bit for bit.  Prints CMocka's lines.

usage: check_files.py LIBMOE.so        Wants numpy and safetensors; with torch there is one test more.
"""
import ctypes as C
import json
import os
import subprocess
import sys
import tempfile
import unittest
import traceback

import numpy as np
import safetensors
from safetensors import deserialize, safe_open, serialize
from safetensors.numpy import load_file

DTYPES = {  # the file's name: (moe_dtype, bytes, name that serialize takes)
    "F64": (1, 8, "float64"), "F32": (2, 4, "float32"), "BF16": (3, 2, "bfloat16"), "F16": (4, 2, "float16"),
    "F8_E4M3": (5, 1, "float8_e4m3fn"), "F8_E5M2": (6, 1, "float8_e5m2"), "I64": (7, 8, "int64"),
    "I32": (8, 4, "int32"), "U8": (9, 1, "uint8"), "BOOL": (10, 1, "bool"),
}
SHAPES = [(), (1,), (3,), (0,), (5, 7), (2, 0, 3), (2, 3, 1, 5), (1, 1, 2, 1, 1, 3)]


class Entry(C.Structure):
    _fields_ = [("size", C.c_uint64), ("name", C.c_char_p), ("file", C.c_char_p), ("dtype_name", C.c_char_p),
                ("data", C.c_void_p), ("bytes", C.c_uint64), ("dtype", C.c_int64), ("rank", C.c_int64),
                ("shape", C.c_int64 * 6), ("hashed", C.c_int64), ("hash", C.c_uint64)]


class Desc(C.Structure):
    _fields_ = [("size", C.c_uint64), ("shard_bytes", C.c_uint64)]


moe = C.CDLL(sys.argv[1])
for call in ("moe_last_error", "moe_checkpoint_metadata", "moe_checkpoint_metadata_key"):
    getattr(moe, call).restype = C.c_char_p
moe.moe_checkpoint_count.restype = C.c_int64
moe.moe_checkpoint_metadata_key.argtypes = [C.c_void_p, C.c_int64]
moe.moe_checkpoint_at.argtypes = [C.c_void_p, C.c_void_p, C.c_int64]


def ok(status):
    assert status == 0, moe.moe_last_error().decode()


def tensors():
    """{name: (dtype, shape, bytes)}, in an order that is nobody's, and values that are legal in every dtype."""
    random = np.random.default_rng(1)
    out = {}
    for i, shape in enumerate(SHAPES):
        for dtype, (_, size, _) in DTYPES.items():
            n = size * int(np.prod(shape, dtype=np.int64))
            data = random.integers(0, 2 if dtype == "BOOL" else 256, n, dtype=np.uint8).tobytes()
            out[f"z{i * 7 % 5}.{dtype}.{i}.\u00e9\""] = (dtype, shape, data)
    return out


def save(path, all_tensors, metadata, shard_bytes=0):
    writer, desc = C.c_void_p(), Desc(C.sizeof(Desc), shard_bytes)
    ok(moe.moe_checkpoint_writer_create(C.byref(writer), path.encode(), C.byref(desc)))
    for key, value in metadata.items():
        ok(moe.moe_checkpoint_writer_metadata(writer, key.encode(), value.encode()))
    for name, (dtype, shape, data) in all_tensors.items():
        ok(moe.moe_checkpoint_writer_add(writer, name.encode(), C.c_int64(DTYPES[dtype][0]), C.c_int64(len(shape)),
                                         (C.c_int64 * 6)(*shape), data))
    ok(moe.moe_checkpoint_writer_commit(writer))
    moe.moe_checkpoint_writer_free(writer)


def load(path):
    c, e, out, metadata, i = C.c_void_p(), Entry(C.sizeof(Entry)), {}, {}, 0
    ok(moe.moe_checkpoint_open(C.byref(c), path.encode()))
    ok(moe.moe_checkpoint_verify(c, None))
    for k in range(moe.moe_checkpoint_count(c)):
        ok(moe.moe_checkpoint_at(C.byref(e), c, k))
        data = C.string_at(e.data, e.bytes) if e.bytes else b""
        assert DTYPES[e.dtype_name.decode()][0] == e.dtype
        out[e.name.decode()] = (e.dtype_name.decode(), tuple(e.shape[:e.rank]), data)
    while (key := moe.moe_checkpoint_metadata_key(c, i)) is not None:
        metadata[key.decode()] = moe.moe_checkpoint_metadata(c, key).decode()
        i += 1
    moe.moe_checkpoint_close(c)
    return out, metadata


def read(path):
    with open(path, "rb") as f:
        return f.read()


def by_python(path):
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in deserialize(read(path))}


def python_reads_libmoe(folder):
    path = os.path.join(folder, "a.safetensors")
    save(path, tensors(), {"config": "{\"d\": 1, \"\u00e9\": \"\\n\"}"})
    assert by_python(path) == tensors()
    with safe_open(path, framework="np") as f:
        metadata = f.metadata()
        assert sorted(f.keys()) == sorted(tensors())
    assert metadata["config"] == "{\"d\": 1, \"\u00e9\": \"\\n\"}" and metadata["format"] == "pt"
    assert metadata["moe.format"] == "1" and len(metadata["moe.xxh3:z0.F32.0.\u00e9\""]) == 16


def python_reads_large_files_of_libmoe(folder):
    """With spaces behind the header, and with data that a long header has pushed back."""
    big = np.arange(5 << 20, dtype=np.float32)
    for n in (1, 6000):
        path = os.path.join(folder, "b.safetensors")
        given = {"big": ("F32", big.shape, big.tobytes())}
        given.update({f"model.layers.0.mlp.experts.{i}.gate_proj.weight": ("F16", (i % 3,), bytes(2 * (i % 3)))
                      for i in range(n)})
        save(path, given, {})
        assert by_python(path) == given


def numpy_maps_libmoe(folder):
    path = os.path.join(folder, "c.safetensors")
    given = {f"{k}{dtype}": np.arange(k, dtype=dtype) for k in (3, 1, 7, 4) for dtype in ("u1", "f2", "f4", "i8", "i4", "f8")}
    names = {"uint8": "U8", "float16": "F16", "float32": "F32", "int64": "I64", "int32": "I32", "float64": "F64"}
    save(path, {k: (names[str(v.dtype)], v.shape, v.tobytes()) for k, v in given.items()}, {})
    got = load_file(path)
    assert sorted(got) == sorted(given)
    for name, value in given.items():
        assert got[name].dtype == value.dtype and (got[name] == value).all()


def libmoe_reads_python(folder):
    path = os.path.join(folder, "d.safetensors")
    metadata = {"format": "pt", "": "empty", "k\u00e9": "a\nb"}
    kept = {name: C.create_string_buffer(data, len(data) + 1) for name, (_, _, data) in tensors().items()}
    given = {}
    for name, (dtype, shape, data) in tensors().items():
        if hasattr(safetensors, "TensorSpec"):  # 0.7 and later
            given[name] = safetensors.TensorSpec(dtype=DTYPES[dtype][2], shape=list(shape),
                                                 data_ptr=C.addressof(kept[name]), data_len=len(data))
        else:
            given[name] = {"dtype": DTYPES[dtype][2], "shape": list(shape), "data": data}
    with open(path, "wb") as f:
        f.write(bytes(serialize(given, metadata)))
    got, found = load(path)
    assert got == tensors() and found == metadata


def shards_are_read_by_their_index(folder):
    path = os.path.join(folder, "model.safetensors.index.json")
    save(path, tensors(), {"k": "v"}, 300)
    index = json.loads(read(path))
    assert set(index["weight_map"]) == set(tensors()) and index["metadata"]["k"] == "v"
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors().values())
    got = {}
    for shard in sorted(set(index["weight_map"].values())):
        part = by_python(os.path.join(folder, shard))
        assert all(index["weight_map"][name] == shard for name in part)
        got.update(part)
    assert got == tensors() and load(folder)[0] == tensors()


def torch_loads_libmoe(folder):
    import torch
    from safetensors.torch import load_file as torch_load

    path = os.path.join(folder, "e.safetensors")
    save(path, tensors(), {})
    got = torch_load(path)
    for name, (dtype, shape, data) in tensors().items():
        assert tuple(got[name].shape) == shape
        assert got[name].reshape(-1).view(torch.uint8).numpy().tobytes() == data, name


def layers_keep_their_names(folder):
    """What transformers wrote, and layers that were loaded from it and saved under the same names."""
    environment = {"MOE_TEST_DEVICE": "opencl:cpu", **os.environ, "TMPDIR": folder, "MOE_TEST_KEEP": "1"}
    run = subprocess.run("tests/unit/t_checkpoint_models", env=environment, capture_output=True, text=True)
    if run.returncode == 77:
        raise unittest.SkipTest(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    saved, = os.listdir(folder)
    oracle = os.path.join(os.environ.get("MOE_TEST_SRCDIR", "."), "tests", "oracle")
    for name in ("mixtral", "qwen3", "olmoe", "deepseek", "gpt_oss"):
        module = "model.layers.0." + ("block_sparse_moe." if name == "mixtral" else "mlp.")
        theirs = by_python(os.path.join(oracle, f"names_{name}.safetensors"))
        theirs = {key: tensor for key, tensor in theirs.items() if key.startswith(module)}
        assert theirs and theirs == by_python(os.path.join(folder, saved, f"saved_{name}.safetensors")), name


tests = [python_reads_libmoe, python_reads_large_files_of_libmoe, numpy_maps_libmoe, libmoe_reads_python,
         shards_are_read_by_their_index, layers_keep_their_names, torch_loads_libmoe]
failed = 0
print(f"[==========] Running {len(tests)} test(s).")
for test in tests:
    print(f"[ RUN      ] {test.__name__}")
    with tempfile.TemporaryDirectory() as work:
        try:
            test(work)
            print(f"[       OK ] {test.__name__}")
        except (ModuleNotFoundError, unittest.SkipTest) as e:
            print(f"{e}\n[  SKIPPED ] {test.__name__}")
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print(f"[  FAILED  ] {test.__name__}")
            failed = 1
print(f"[==========] {len(tests)} test(s) run.")
sys.exit(failed)
