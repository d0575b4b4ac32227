"""check_dlpack.py LIBRARY : tensors between libmoe and PyTorch through DLPack capsules, on the device of MOE_TEST_DEVICE.

On an OpenCL device the tensors are torch's of the CPU (in place where the device is a CPU, else copied); on a CUDA device
they are torch's of the GPU, in place. Prints CMocka's lines, which the driver counts; exit status 77 is a skip.
"""
import ctypes as c
import gc
import os
import sys

import torch

READ_ONLY, COPY = 1, 2
ERR_INVALID, ERR_NO_DEVICE = -1, -3
F32 = 2

moe = c.CDLL(sys.argv[1])
api = c.pythonapi
api.PyCapsule_GetPointer.restype = c.c_void_p
api.PyCapsule_GetPointer.argtypes = [c.py_object, c.c_char_p]
api.PyCapsule_GetName.restype = c.c_char_p
api.PyCapsule_GetName.argtypes = [c.py_object]
api.PyCapsule_SetName.argtypes = [c.py_object, c.c_char_p]
api.PyCapsule_New.restype = c.py_object
api.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]


class Desc(c.Structure):
    _fields_ = [("size", c.c_uint64), ("device", c.c_char_p), ("rest", c.c_void_p * 6)]


class Span(c.Structure):
    _fields_ = [("handle", c.c_void_p), ("offset", c.c_uint64), ("bytes", c.c_uint64)]


class Tensor(c.Structure):
    _fields_ = [("handle", c.c_void_p), ("offset", c.c_uint64), ("dtype", c.c_int32), ("rank", c.c_int32),
                ("shape", c.c_int64 * 6), ("stride", c.c_int64 * 6)]


moe.moe_last_error.restype = c.c_char_p
moe.moe_tensor_fill.argtypes = [c.c_void_p, c.c_void_p, c.c_double]
moe.moe_tensor_packed.argtypes = [c.c_void_p, Span, c.c_int64, c.c_int64, c.c_void_p]
moe.moe_dlpack_import.argtypes = moe.moe_dlpack_import_unversioned.argtypes = [c.c_void_p] * 4 + [c.c_int64]
moe.moe_dlpack_export.argtypes = [c.c_void_p] * 3 + [c.c_int64, c.c_void_p, c.c_void_p]
for n, names in ((1, "dlpack_free queue_wait queue_free context_free"), (3, "queue_from_cuda"),
                 (2, "dlpack_wait queue_create queue_to_cuda context_create span_free")):
    for name in names.split():
        getattr(moe, "moe_" + name).argtypes = [c.c_void_p] * n
moe.moe_span_alloc.argtypes = [c.c_void_p, c.c_void_p, c.c_uint64]
releaser = c.CFUNCTYPE(None, c.c_void_p)


def good(status):
    assert status == 0, moe.moe_last_error().decode()


def address(thing):
    return c.addressof(thing)


def capsule_of(x, versioned, **how):
    """With torch's work on x ordered before ours, on the GPU."""
    if x.is_cuda and not how:
        how = {"stream": own_stream.value}
    return x.__dlpack__(max_version=(1, 0), **how) if versioned else x.__dlpack__(**how)


# The capsule keeps the pointer, not the text.
used = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


class Imported:
    """A tensor of another library, taken over as Python's protocol wants it: the capsule is renamed."""

    def __init__(self, capsule, flags, q=None):
        self.q = q or queue
        self.holder, self.tensor = c.c_void_p(), Tensor()
        name = api.PyCapsule_GetName(capsule)
        take = moe.moe_dlpack_import if name == b"dltensor_versioned" else moe.moe_dlpack_import_unversioned
        self.status = take(address(self.holder), address(self.tensor), self.q, api.PyCapsule_GetPointer(capsule, name),
                           flags)
        if self.status == 0:
            api.PyCapsule_SetName(capsule, used[name])

    def wait(self):
        good(moe.moe_dlpack_wait(self.holder, self.q))

    def free(self):
        moe.moe_dlpack_free(self.holder)


def exported(tensor, flags, release=None):
    out = c.c_void_p()
    good(moe.moe_dlpack_export(address(out), queue, address(tensor), flags, release, None))
    return torch.utils.dlpack.from_dlpack(api.PyCapsule_New(out, b"dltensor_versioned", None))


def same(a, b):
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8),
                                                                     b.flatten().view(torch.uint8))


# ---- tests -------------------------------------------------------------------------------------------------------
def views(x):
    """Of [4,6]: packed, exchanged, cut, stepped, repeated, without elements, one element, rank 0."""
    return [x, x.t(), x[1:, 2:5], x[:, ::3], x[1].expand(3, 6), x[2:2], x[3:, 5:], x[2, 3], x.reshape(1, 2, 2, 1, 3, 2)]


def values_arrive():
    names = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"]
    tried = 0
    for name in names:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        x = (torch.arange(24).reshape(4, 6) % 7 - (0 if name in ("uint8", "bool") else 3)).to(device=place, dtype=dtype)
        for view in views(x):
            for versioned in (True, False):
                try:
                    capsule = capsule_of(view, versioned)
                except (BufferError, RuntimeError, TypeError):
                    assert "float8" in name, name  # torch may not give these away
                    continue
                got = Imported(capsule, READ_ONLY | COPY)
                good(got.status)
                assert list(got.tensor.shape)[:got.tensor.rank] == list(view.shape)
                assert same(exported(got.tensor, COPY), view), (name, view.shape, view.stride())
                got.free()
                tried += 1
    assert tried >= 8 * 9 * 2


def written_values_return():
    x = torch.zeros(5, 8, device=place)
    got = Imported(capsule_of(x[1:4], True), COPY)
    good(got.status)
    good(moe.moe_tensor_fill(queue, address(got.tensor), 1.5))
    got.wait()
    assert x[0].abs().sum() == 0 and x[4].abs().sum() == 0 and bool((x[1:4] == 1.5).all())
    got.free()


def memory_lives_until_freed():
    import numpy
    owner = numpy.arange(12, dtype=numpy.float32)
    before = sys.getrefcount(owner)
    x = torch.from_numpy(owner)
    got = Imported(capsule_of(x, True), COPY | READ_ONLY)
    good(got.status)
    del x
    gc.collect()
    assert sys.getrefcount(owner) == before + 1
    assert same(exported(got.tensor, COPY), torch.arange(12, dtype=torch.float32))
    got.free()
    gc.collect()
    assert sys.getrefcount(owner) == before


def a_refused_capsule_stays_its_owners():
    x = torch.arange(4, device=place).to(torch.complex64)
    for versioned in (True, False):
        got = Imported(capsule_of(x, versioned), COPY)
        assert got.status == ERR_INVALID, got.status
        assert b"code 5" in moe.moe_last_error()
    assert bool((x.real == torch.arange(4, device=place)).all())


def read_only_arrays_are_for_those_who_ask():
    import numpy
    x = numpy.arange(6, dtype=numpy.float32)
    x.flags.writeable = False
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except (TypeError, BufferError):
        return  # a NumPy before 2.1
    got = Imported(capsule, COPY)
    assert got.status == ERR_INVALID and b"read-only" in moe.moe_last_error()
    got = Imported(capsule, COPY | READ_ONLY)
    good(got.status)
    assert same(exported(got.tensor, COPY), torch.arange(6, dtype=torch.float32))
    got.free()


def torch_takes_ours():
    span, t, shape = Span(), Tensor(), (c.c_int64 * 2)(3, 4)
    good(moe.moe_span_alloc(address(span), context, 48))
    good(moe.moe_tensor_packed(address(t), span, F32, 2, address(shape)))
    good(moe.moe_tensor_fill(queue, address(t), 2.25))
    good(moe.moe_queue_wait(queue))
    calls = []
    release = releaser(lambda user: calls.append(user))
    for flags in (COPY, 0) if moe_device.startswith("cuda") else (COPY,):
        del calls[:]
        x = exported(t, flags, release)
        assert x.shape == (3, 4) and x.is_cuda == (flags == 0)
        assert bool((x == 2.25).all()) and not calls
        x.fill_(7)
        if flags == 0:
            torch.cuda.synchronize()
        assert same(exported(t, COPY), torch.full((3, 4), 7.0 if flags == 0 else 2.25))
        del x
        gc.collect()
        assert len(calls) == 1, calls
    moe.moe_span_free(context, address(span))


def the_order_of_streams():
    """Work that torch has not done yet comes before ours on the queue's own stream, and ours before torch's."""
    lent = c.c_void_p()
    own = torch.cuda.ExternalStream(own_stream.value)
    for _ in range(5):
        x = torch.zeros(1 << 22, device=place)
        busy = torch.randn(4096, 4096, device=place)
        for _ in range(20):
            busy = busy @ busy * 1e-3
        x.add_(3)
        got = Imported(capsule_of(x, True), 0)
        good(got.status)
        copy = exported(got.tensor, COPY)
        assert bool((copy == 3).all())
        good(moe.moe_tensor_fill(queue, address(got.tensor), 5))
        torch.cuda.current_stream().wait_stream(own)
        assert bool((x == 5).all())
        got.free()
    # The producer's own stream, lent: nothing to wait for.
    side = torch.cuda.Stream()
    good(moe.moe_queue_from_cuda(address(lent), context, side.cuda_stream))
    with torch.cuda.stream(side):
        x = torch.full((1 << 20,), 2.0, device=place)
        got = Imported(capsule_of(x, True, stream=side.cuda_stream), 0, lent)
        good(got.status)
        good(moe.moe_tensor_fill(lent, address(got.tensor), 4))
        assert bool((x == 4).all())
        got.free()
    moe.moe_queue_free(lent)


def main():
    tests = [values_arrive, written_values_return, memory_lives_until_freed, a_refused_capsule_stays_its_owners,
             read_only_arrays_are_for_those_who_ask, torch_takes_ours]
    if moe_device.startswith("cuda"):
        tests.append(the_order_of_streams)
    failed = 0
    print("[==========] Running %d test(s)." % len(tests))
    for test in tests:
        print("[ RUN      ] " + test.__name__, flush=True)
        try:
            test()
            print("[       OK ] " + test.__name__)
        except Exception as e:  # the driver shows the line
            failed = 1
            print("ERROR: %s: %s" % (type(e).__name__, str(e).replace("\n", " ")))
            print("[  FAILED  ] " + test.__name__)
    print("[==========] %d test(s) run." % len(tests), flush=True)
    return failed


moe_device = os.environ.get("MOE_TEST_DEVICE", "opencl:cpu")
context, queue = c.c_void_p(), c.c_void_p()
desc = Desc(size=c.sizeof(Desc), device=moe_device.encode())
status = moe.moe_context_create(address(context), address(desc))
if status == ERR_NO_DEVICE:
    print("SKIP: " + moe.moe_last_error().decode())
    sys.exit(77)
good(status)
good(moe.moe_queue_create(address(queue), context))
if moe_device.startswith("cuda") and not torch.cuda.is_available():
    print("SKIP: torch has no CUDA")
    sys.exit(77)
place, own_stream = "cpu", c.c_void_p()
if moe_device.startswith("cuda"):
    place = "cuda"
    good(moe.moe_queue_to_cuda(address(own_stream), queue))
result = main()
moe.moe_queue_free(queue)
moe.moe_context_free(context)
sys.exit(result)
