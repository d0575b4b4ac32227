#!/usr/bin/env python3
"""compare_torch.py - libmoe's routed expert branch beside PyTorch's and others', in one process on one CUDA stream.

Every contestant gets the same tensors (libmoe: the same memory, without copies), the same choices and routing weights,
and gives y, dx, dW1 [E,2F,D] (gate, then up), dW2 [E,D,F] and the gradient of the routing weights (libmoe: of the
logits).  Each is compared with a reference in double precision before it is timed; one that is wrong is not timed.
Contestants take turns, the L2 cache is overwritten before each forward, times are medians of CUDA events.

What is inside the times: router and top-k never.  Sorting the rows by expert is outside for torch, ScatterMoE and
SonicMoE, and inside for libmoe (with the routing weights) and Liger, whose interfaces do not part it.

  torch eager, torch compiled   torch._grouped_mm, with gather, SwiGLU and sum written plainly
  scattermoe                    where `scattermoe` can be imported (its source on PYTHONPATH)
  liger                         likewise `liger_kernel`
  sonicmoe                      likewise `sonicmoe`

0: all right, 1: libmoe is wrong or failed, 2: wrong usage, 77: skipped."""
import argparse
import ctypes
import datetime
import inspect
import itertools
import json
import pathlib
import re
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent.parent
sys.path.insert(0, str(HERE))
from libmoe import Library, MoeError  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

# Largest relative error ||got - reference|| / ||reference|| of each output.
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}
DTYPES = torch and {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FLUSHED = 256 << 20  # bytes overwritten before each forward: more than any L2 cache holds


def named_shapes():
    """The table of moe_layer.c: name -> (T, D, F, E, K), and which are targets."""
    rows = re.findall(r'\{ "([\w.-]+)", (\d+), (\d+), (\d+), (\d+), (\d+), (\d) \}', (HERE / "moe_layer.c").read_text())
    return {row[0]: tuple(map(int, row[1:6])) for row in rows}, [row[0] for row in rows if row[6] == "1"]


# ---- the problem -----------------------------------------------------------------------------------------------------
class Problem:
    """Inputs of order 1, and the top K of random logits: each expert alike, or with odds 1, 1/2, 1/3, ..."""

    def __init__(self, shape, dtype, device, zipf, seed=1):
        self.T, self.D, self.F, self.E, self.K = T, D, F, E, K = shape
        random = torch.Generator(device=device).manual_seed(seed)

        def normal(*size, scale=1.0):
            t = torch.empty(size, dtype=dtype, device=device)
            return t.normal_(generator=random).mul_(scale)

        self.dtype, self.device, self.R = dtype, device, T * K
        self.x, self.dy = normal(T, D), normal(T, D)
        self.w1, self.w2 = normal(E, 2 * F, D, scale=D**-0.5), normal(E, D, F, scale=F**-0.5)
        uniform = torch.rand(T, E, generator=random, device=device).clamp_(1e-7, 1 - 1e-7)
        self.logits = -(-uniform.log()).log()
        if zipf:
            self.logits -= torch.arange(1, E + 1, device=device).log()
        chosen = self.logits.topk(K, dim=1)
        self.ids = chosen.indices.to(torch.int32)
        self.weights = chosen.values.softmax(dim=1)
        # Rows by (expert, slot), as the library's plan orders them.
        self.sorted_ids, self.row2slot = chosen.indices.flatten().sort(stable=True)
        self.slot2row = torch.empty_like(self.row2slot)
        self.slot2row[self.row2slot] = torch.arange(self.R, device=device)
        self.tokens = self.row2slot // K
        self.counts = torch.bincount(self.ids.flatten(), minlength=E)
        self.ends = self.counts.cumsum(0).to(torch.int32)
        # libmoe's weight gradients, FP32 or not, in the same memory.
        self.gradient_memory = {t.numel(): torch.empty(t.numel(), dtype=torch.float32, device=device)
                                for t in (self.w1, self.w2)}

    def reference(self):
        """In double, expert by expert: yields (expert, dW1, dW2) and returns y, dx, gradient of the weights."""
        x, dy, weights = self.x.double(), self.dy.double(), self.weights.double().flatten()
        y, dx, dweights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
        end = 0
        for e, count in enumerate(self.counts.tolist()):
            rows = slice(end, end + count)
            end += count
            slots, tokens = self.row2slot[rows], self.tokens[rows]
            w1, w2, w = self.w1[e].double(), self.w2[e].double(), weights[slots, None]
            gate, up = (x[tokens] @ w1.T).chunk(2, dim=1)
            sigmoid = gate.sigmoid()
            a = gate * sigmoid * up
            y.index_add_(0, tokens, w * (a @ w2.T))
            da = dy[tokens] @ w2
            dweights[slots] = (da * a).sum(1)
            da = da * w
            dh = torch.cat([da * up * sigmoid * (1 + gate * (1 - sigmoid)), da * gate * sigmoid], dim=1)
            dx.index_add_(0, tokens, dh @ w1)
            yield e, dh.T @ x[tokens], dy[tokens].T @ (w * a)
        return y, dx, dweights.view(self.T, self.K)

    def logits_gradient(self, dweights):
        """Through the softmax over the chosen."""
        w = self.weights.double()
        d = w * (dweights - (w * dweights).sum(1, keepdim=True))
        return torch.zeros(self.T, self.E, dtype=d.dtype, device=d.device).scatter_(1, self.ids.long(), d)


# ---- libmoe ----------------------------------------------------------------------------------------------------------
class Device:
    """A context and a queue.  On CUDA torch's memory is the library's; elsewhere each storage has a copy in the
    device's, written by push and read by pull."""

    def __init__(self, lib, name, stream):
        self.lib, self.context, self.queue, self.copies = lib, ctypes.c_void_p(), ctypes.c_void_p(), {}
        self.desc = lib.new("moe_context_desc", device=name.encode())
        lib.moe_context_create(ctypes.byref(self.context), ctypes.byref(self.desc))
        if stream is not None:
            lib.moe_queue_from_cuda(ctypes.byref(self.queue), self.context, stream.cuda_stream)
        else:
            lib.moe_queue_create(ctypes.byref(self.queue), self.context)
        self.info = lib.new("moe_device_info")
        lib.moe_context_info(self.context, ctypes.byref(self.info))
        self.shared = stream is not None

    def span(self, t):
        """Of a tensor's whole storage."""
        storage = t.untyped_storage()
        if self.shared:
            return self.lib.new("moe_span", handle=storage.data_ptr(), bytes=storage.nbytes())
        key = storage.data_ptr()
        if key not in self.copies:
            span = self.lib.new("moe_span")
            self.lib.moe_span_alloc(ctypes.byref(span), self.context, storage.nbytes())
            self.copies[key] = storage, span
        return self.copies[key][1]

    def tensor(self, t):
        kinds = {torch.float32: self.lib.MOE_F32, torch.bfloat16: self.lib.MOE_BF16, torch.float16: self.lib.MOE_F16,
                 torch.float64: self.lib.MOE_F64, torch.int32: self.lib.MOE_I32}
        span = self.span(t)
        view = self.lib.new("moe_tensor", handle=span.handle, dtype=kinds[t.dtype], rank=t.dim(),
                            offset=span.offset + t.storage_offset() * t.element_size())
        view.shape[: t.dim()], view.stride[: t.dim()] = t.shape, t.stride()
        return view

    def push(self):
        for storage, span in self.copies.values():
            self.lib.moe_span_write(self.queue, span, storage.data_ptr(), storage.nbytes())

    def pull(self):
        for storage, span in self.copies.values():
            self.lib.moe_span_read(self.queue, storage.data_ptr(), span, storage.nbytes())

    def close(self):
        for _, span in self.copies.values():
            self.lib.moe_span_free(self.context, ctypes.byref(span))
        self.lib.moe_queue_free(self.queue)
        self.lib.moe_context_free(self.context)


class Libmoe:
    name = "libmoe"
    logits = True  # gives the gradient of the logits, not of the weights
    no_graph = ""

    def __init__(self, p, device, grad_dtype=None):
        lib, F = device.lib, p.F
        self.lib, self.device = lib, device
        if grad_dtype:
            self.name = "libmoe, f32 gradients"
        self.experts = ctypes.c_void_p()
        self.parts = [
            lib.new("moe_selection_options", kind=lib.MOE_SELECT_SOFTMAX, top_k=p.K),
            lib.new("moe_weights_options", scoring=lib.MOE_SOFTMAX, renormalize=1, scale=1.0),
            lib.new("moe_activation", kind=lib.MOE_SILU, gated=1),
        ]
        empty = torch.empty_like
        self.y, self.dx, self.dlogits = empty(p.x), empty(p.x), empty(p.logits)
        self.dw1, self.dw2 = (p.gradient_memory[t.numel()].view(grad_dtype or p.dtype)[: t.numel()].view_as(t)
                              for t in (p.w1, p.w2))
        tensor = device.tensor
        self.io = lib.new("moe_experts_io", x=tensor(p.x), logits=tensor(p.logits), ids=tensor(p.ids),
                          gate=tensor(p.w1[:, :F]), up=tensor(p.w1[:, F:]), down=tensor(p.w2), y=tensor(self.y))
        self.desc = lib.new(
            "moe_experts_desc", d_model=p.D, d_ff=F, n_experts=p.E, dtype=self.io.x.dtype,
            weight_grad_dtype=tensor(self.dw1).dtype, selection=ctypes.addressof(self.parts[0]),
            weights=ctypes.addressof(self.parts[1]), activation=ctypes.addressof(self.parts[2]),
            reduction=lib.MOE_PLANE, gate=self.io.gate, up=self.io.up, down=self.io.down)
        lib.moe_experts_create(ctypes.byref(self.experts), device.context, ctypes.byref(self.desc))
        wanted = lib.MOE_GRAD_INPUT | lib.MOE_GRAD_LOGITS | lib.MOE_GRAD_GATE | lib.MOE_GRAD_UP | lib.MOE_GRAD_DOWN
        self.bytes = lib.new("moe_experts_bytes")
        lib.moe_experts_measure(ctypes.byref(self.bytes), self.experts, p.T, wanted)
        self.kept = self.bytes.saved + p.logits.nbytes
        self.saved = torch.empty(self.bytes.saved, dtype=torch.uint8, device=p.device)
        self.scratch = torch.empty(self.bytes.scratch, dtype=torch.uint8, device=p.device)
        self.io.saved, self.io.scratch = device.span(self.saved), device.span(self.scratch)
        self.gradients = lib.new("moe_experts_grads", dy=tensor(p.dy), dx=tensor(self.dx), dlogits=tensor(self.dlogits),
                             dgate=tensor(self.dw1[:, :F]), dup=tensor(self.dw1[:, F:]), ddown=tensor(self.dw2))
        self.state = lib.new("moe_state")

    def forward(self):
        self.lib.moe_experts_forward(self.experts, self.device.queue, ctypes.byref(self.io), ctypes.byref(self.state))

    def backward(self):
        self.lib.moe_experts_backward(self.experts, self.device.queue, ctypes.byref(self.state), ctypes.byref(self.io),
                                      ctypes.byref(self.gradients))

    def results(self):
        self.device.push()
        self.forward()
        self.backward()
        self.lib.moe_queue_wait(self.device.queue)
        self.device.pull()
        return self.y, self.dx, self.dlogits, self.dw1, self.dw2

    def check_sizes(self):
        """The structs that the library reads, and those that it fills."""
        lib, queue, ref = self.lib, self.device.queue, ctypes.byref
        out = ctypes.c_void_p()

        def create(member, longer):
            desc = type(self.desc).from_buffer_copy(self.desc)
            setattr(desc, member, ctypes.addressof(longer))
            lib.moe_experts_create(ref(out), self.device.context, ref(desc))

        lib.check_size(self.device.desc, lambda s: lib.moe_context_create(ref(out), s))
        lib.check_size(self.desc, lambda s: lib.moe_experts_create(ref(out), self.device.context, s))
        for part, member in zip(self.parts, ("selection", "weights", "activation")):
            lib.check_size(part, lambda s, m=member: create(m, s))
        lib.check_size(self.io, lambda s: lib.moe_experts_inference(self.experts, queue, s))
        lib.check_size(self.state, lambda s: lib.moe_experts_backward(self.experts, queue, s, ref(self.io),
                                                                      ref(self.gradients)))
        lib.check_size(self.gradients, lambda s: lib.moe_experts_backward(self.experts, queue, ref(self.state),
                                                                      ref(self.io), s))
        for name, fill in (("moe_device_info", lambda s: lib.moe_context_info(self.device.context, s)),
                           ("moe_experts_bytes", lambda s: lib.moe_experts_measure(s, self.experts, 1, 0))):
            size = ctypes.sizeof(getattr(lib, name))
            longer = ctypes.create_string_buffer(b"\xff" * (size + 8), size + 8)
            ctypes.memmove(longer, ref(ctypes.c_uint64(size + 8)), 8)
            fill(longer)
            if longer.raw[size:] != b"\xff" * 8 or longer.raw[size - 8:size] == b"\xff" * 8:
                raise AssertionError(f"{name}: the library's is not {size} bytes")

    def close(self):
        self.lib.moe_experts_free(self.experts)


# ---- the others ------------------------------------------------------------------------------------------------------
class Autograd:
    """A function of (x, w1, w2, weights) that autograd derives."""

    logits = False
    no_graph = ""  # why it cannot be captured

    def __init__(self, p):
        self.p = p
        self.inputs = [t.detach().requires_grad_() for t in (p.x, p.w1, p.w2, self.scores(p))]
        self.y = self.grads = self.kept = None

    def scores(self, p):
        return p.weights

    def layer(self, x, w1, w2, weights):
        raise NotImplementedError

    def forward(self):
        self.y = self.layer(*self.inputs)

    def backward(self):
        self.grads = torch.autograd.grad(self.y, self.inputs, self.p.dy)
        self.y = None

    def results(self):
        self.forward()
        y = self.y.detach()
        self.backward()
        dx, dw1, dw2, dweights = self.grads
        self.grads = None
        return y, dx, dweights, dw1, dw2

    def close(self):
        self.y = self.grads = self.inputs = None


class TorchEager(Autograd):
    name = "torch eager"

    def __init__(self, p):
        super().__init__(p)
        self.product = getattr(torch, "_grouped_mm", None) or torch.nn.functional.grouped_mm

    def scores(self, p):
        return p.weights.to(p.dtype)

    def layer(self, x, w1, w2, weights):
        p = self.p
        gate, up = self.product(x[p.tokens], w1.transpose(1, 2), offs=p.ends).chunk(2, dim=1)
        a = torch.nn.functional.silu(gate) * up
        rows = self.product(a, w2.transpose(1, 2), offs=p.ends)[p.slot2row]
        return torch.bmm(weights.unsqueeze(1), rows.view(p.T, p.K, p.D)).squeeze(1)


class TorchCompiled(TorchEager):
    name = "torch compiled"

    def __init__(self, p):
        super().__init__(p)
        torch._dynamo.reset()  # or it falls back to eager at the eighth shape
        self.layer = torch.compile(super().layer, dynamic=False)


class ScatterMoE(Autograd):
    name = "scattermoe"

    def __init__(self, p):
        from scattermoe.parallel_experts import parallel_linear
        if p.w1.numel() >= 2**31:  # an illegal access would end the process's use of the device
            raise OverflowError(f"its offsets have 32 bits, W1 has {p.w1.numel()} elements")
        super().__init__(p)
        self.linear = parallel_linear

    def scores(self, p):
        return p.weights.to(p.dtype)

    def layer(self, x, w1, w2, weights):
        p = self.p
        order = (p.sorted_ids, p.row2slot, p.ends.long())
        gate, up = self.linear(x, w1.permute(0, 2, 1), p.K, *order, grouped_out=True).chunk(2, dim=1)
        a = torch.nn.functional.silu(gate) * up
        return self.linear(a, w2.permute(0, 2, 1), 1, *order, grouped_in=True, gates=weights)


class Liger(Autograd):
    name = "liger"
    no_graph = "its routing waits for the device"

    def __init__(self, p):
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
        super().__init__(p)
        self.apply = LigerFusedMoEFunction.apply

    def scores(self, p):
        return p.weights.to(p.dtype)

    def layer(self, x, w1, w2, weights):
        return self.apply(x, w1, w2, self.p.ids, weights)


class SonicMoE(Autograd):
    """Its two projections, with their arguments by name, since they differ from version to version."""

    name = "sonicmoe"

    def __init__(self, p):
        import sonicmoe.functional as functional
        from sonicmoe.enums import ActivationType
        super().__init__(p)
        self.up, self.down = functional._UpProjection, functional._DownProjection
        # Rows of gate and up alternate in its W1.
        self.inputs[1] = p.w1.view(p.E, 2, p.F, p.D).transpose(1, 2).reshape(p.E, 2 * p.F, p.D).requires_grad_()
        int32 = {"dtype": torch.int32, "device": p.device}
        starts = torch.zeros(p.E + 1, **int32)
        starts[1:] = p.ends
        self.known = {
            "b1": None, "b2": None, "expert_frequency_offset": starts, "total_expert_freq": p.R, "T": p.T, "K": p.K,
            "stream_id": torch.cuda.current_stream().cuda_stream, "x_gather_idx": p.tokens.to(**int32),
            "s_scatter_idx": p.row2slot.to(**int32), "s_reverse_scatter_idx": p.slot2row.to(**int32),
            "num_activated_expert_per_token_offset": None, "is_varlen_K": False,
            "activation_type": ActivationType.SWIGLU, "is_inference_mode_enabled": False,
            "is_inference_mode": False, "is_concatenated_gate_up": False, "concat_layout": False,
            "is_each_token_has_variable_activated_experts": False,
        }

    def call(self, function, **tensors):
        names = list(inspect.signature(function.forward).parameters)[1:]
        return function.apply(*[{**self.known, **tensors}[name] for name in names])

    def layer(self, x, w1, w2, weights):
        a, h = self.call(self.up, x=x, w1=w1.permute(1, 2, 0))
        return self.call(self.down, a=a, h=h, y1=a, z=h, w2=w2.permute(1, 2, 0), topk_scores=weights)

    def results(self):
        p = self.p
        y, dx, dweights, dw1, dw2 = super().results()
        return y, dx, dweights, dw1.view(p.E, p.F, 2, p.D).transpose(1, 2).reshape(p.w1.shape), dw2


PEERS = [TorchEager, TorchCompiled, ScatterMoE, Liger, SonicMoE]


# ---- right? ----------------------------------------------------------------------------------------------------------
def errors_of(contestant, p):
    """Relative error of each output against the reference in double."""
    y, dx, last, dw1, dw2 = contestant.results()
    sums = {"dW1": [0.0, 0.0], "dW2": [0.0, 0.0]}
    reference = p.reference()
    while True:
        try:
            e, want1, want2 = next(reference)
        except StopIteration as stop:
            want_y, want_dx, want_last = stop.value
            break
        for name, got, want in (("dW1", dw1[e], want1), ("dW2", dw2[e], want2)):
            sums[name][0] += (got.double() - want).square().sum().item()
            sums[name][1] += want.square().sum().item()
    if contestant.logits:
        want_last = p.logits_gradient(want_last)
    errors = {name: (wrong / right) ** 0.5 for name, (wrong, right) in sums.items()}
    third = "dlogits" if contestant.logits else "dweights"
    for name, got, want in (("y", y, want_y), ("dx", dx, want_dx), (third, last, want_last)):
        errors[name] = ((got.double() - want).norm() / want.norm()).item()
    return errors


def is_right(errors, dtype):
    return all(error <= TOLERANCE[dtype] for error in errors.values())  # false for NaN


def words(errors):
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


# ---- how fast? -------------------------------------------------------------------------------------------------------
class Graphed:
    """Forward and backward of a contestant as two CUDA graphs.  All graphs of a shape share one pool of memory: they
    are replayed in the order of their captures, and nobody reads what they leave."""

    def __init__(self, contestant, stream, pool):
        self.name = contestant.name + ", graph"
        graphs = []
        for _ in range(3):
            contestant.forward()
            contestant.backward()
        torch.cuda.synchronize()
        for part in (contestant.forward, contestant.backward):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                part()
            graphs.append(graph)
        contestant.grads = None  # the next capture may have the memory
        self.forward, self.backward = graphs[0].replay, graphs[1].replay

    def close(self):
        self.forward = self.backward = None


def measure_kept(contestant):
    """Bytes that forward leaves allocated for backward, without the output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    contestant.forward()
    kept = torch.cuda.memory_allocated() - before - contestant.y.nbytes
    contestant.backward()
    contestant.grads = None
    return kept


def race(contestants, rounds, warm):
    """{name: (forward ms, backward ms), medians, or what it raised}; the contestants take turns in each round."""
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    times, results = {c.name: ([], []) for c in contestants}, {}
    for i in range(-warm, rounds):
        events = {}
        for c in contestants:
            if c.name in results:
                continue
            flushed.zero_()
            at = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            try:
                at[0].record()
                c.forward()
                at[1].record()
                c.backward()
                at[2].record()
                events[c.name] = at
            except Exception as error:  # out of memory, mostly
                results[c.name] = reason(error)
        torch.cuda.synchronize()
        for name, at in events.items():
            if i >= 0:
                times[name][0].append(at[0].elapsed_time(at[1]))
                times[name][1].append(at[1].elapsed_time(at[2]))
    return {name: results.get(name) or tuple(map(statistics.median, both)) for name, both in times.items()}


def reason(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def admit(entries, contestants, p, make, options, stream, pool):
    """Makes a contestant, compares its results, and captures its graphs; what fails is said in its entry.  Returns
    whether it is right."""
    entry = {"name": getattr(make, "name", "libmoe")}
    entries.append(entry)
    c = None
    try:
        c = make(p)
        entry["name"] = c.name
        entry["errors"] = errors_of(c, p)
        entry["right"] = is_right(entry["errors"], options.dtype)
        if not entry["right"]:
            raise AssertionError("wrong: " + words(entry["errors"]))
        entry["kept_mib"] = (measure_kept(c) if c.kept is None else c.kept) / 2**20
        contestants.append(c)
    except ImportError as error:
        entry["skipped"] = reason(error)
    except Exception as error:  # whatever a peer raises is its result
        entry["failed"] = reason(error)
    if c not in contestants:
        if c:
            c.close()
        return False
    if options.graphs:
        entries.append({"name": c.name + ", graph", "kept_mib": entry["kept_mib"]})
        try:
            if c.no_graph:
                raise RuntimeError(c.no_graph)
            contestants.append(Graphed(c, stream, pool))
        except Exception as error:
            entries[-1]["failed"] = reason(error)
            torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return True


def print_times(entries, times, work):
    rates = f"{'TFLOP/s':>8} {'libmoe x':>8}"
    print(f"  {'':32} {'forward ms':>10} {rates} {'backward ms':>11} {rates} {'kept MiB':>9}")
    for entry in entries:
        both = times.get(entry["name"])
        if isinstance(both, str):
            entry["failed"] = both
        if "failed" in entry or "skipped" in entry:
            print(f"  {entry['name']:32} {entry.get('failed') or entry['skipped']}")
            continue
        entry.update(forward_ms=both[0], backward_ms=both[1], forward_tflops=1e-9 * work / both[0],
                     backward_tflops=2e-9 * work / both[1])
        ours = times.get("libmoe, graph" if entry["name"].endswith(", graph") else "libmoe")
        ratios = [ms / our for ms, our in zip(both, ours)] if isinstance(ours, tuple) else [float("nan")] * 2
        print(f"  {entry['name']:32} {both[0]:10.3f} {entry['forward_tflops']:8.1f} {ratios[0]:8.2f} {both[1]:11.3f} "
              f"{entry['backward_tflops']:8.1f} {ratios[1]:8.2f} {entry['kept_mib']:9.1f}")
    sys.stdout.flush()


def run_shape(name, shape, router, options, device, stream):
    """Prints a table; returns the record for the JSON, and whether libmoe was right."""
    T, D, F, E, K = shape
    p = Problem(shape, DTYPES[options.dtype], "cuda", router == "zipf")
    fewest, most = p.counts.min().item(), p.counts.max().item()
    print(f"\n{name} (T,D,F,E,K = {T},{D},{F},{E},{K}), {router} router: {fewest} to {most} rows of an expert")
    entries, contestants, pool = [], [], torch.cuda.graph_pool_handle() if options.graphs else None
    right = admit(entries, contestants, p, lambda q: Libmoe(q, device), options, stream, pool)
    if p.dtype != torch.float32:
        right &= admit(entries, contestants, p, lambda q: Libmoe(q, device, torch.float32), options, stream, pool)
    for peer in PEERS:
        if options.peers == "all" or peer.name.split()[0] in options.peers.split(","):
            admit(entries, contestants, p, peer, options, stream, pool)
    print_times(entries, race(contestants, options.rounds, 3), 6 * p.R * D * F)
    for c in contestants:
        c.close()
    return {"shape": name, "T": T, "D": D, "F": F, "E": E, "K": K, "router": router, "fewest_rows": fewest,
            "most_rows": most, "contestants": entries}, right


# ---- the program -----------------------------------------------------------------------------------------------------
def check(lib, options, stream):
    """Results, and the sizes of structs, on any device, at small shapes."""
    kind = "cuda" if stream else "cpu"
    wrong = 0
    device = Device(lib, options.device, stream)
    print(f"{device.info.id.decode()}: {device.info.name.decode()}, libmoe {lib.moe_version_string().decode()}, "
          f"torch {torch.__version__}, {options.dtype}")
    for shape in ((64, 32, 48, 8, 2), (33, 40, 24, 5, 3), (1, 8, 8, 4, 4)):
        for zipf in (False, True):
            p = Problem(shape, DTYPES[options.dtype], kind, zipf)
            for make in [lambda q: Libmoe(q, device), TorchEager] + ([ScatterMoE, Liger, SonicMoE] if stream else []):
                try:
                    c = make(p)
                    errors = errors_of(c, p)
                except ImportError as error:
                    print(f"  {make.name:12} skipped: {reason(error)}")
                    continue
                good = is_right(errors, options.dtype)
                wrong += not good
                print(f"  {c.name:12} {str(shape):22} {'zipf' if zipf else 'even'}: {words(errors)}"
                      f"{'' if good else '  WRONG'}")
                if isinstance(c, Libmoe):
                    c.check_sizes()
                c.close()
    device.close()
    print(f"sizes of structs agree; {wrong} wrong results")
    return 1 if wrong else 0


def find_library(given):
    places = [pathlib.Path(given)] if given else [
        folder / ".libs" / "libmoe.so" for folder in (pathlib.Path.cwd(), TREE / "build", TREE)]
    return next((place for place in places if place.exists()), None)


def main():
    shapes, targets = named_shapes()
    parser = argparse.ArgumentParser(description="libmoe beside PyTorch, ScatterMoE, Liger and SonicMoE")
    parser.add_argument("--lib", help="libmoe.so [.libs/ here, or in build/ of the source tree]")
    parser.add_argument("--include", default=TREE / "include", help="folder of its moe/*.h")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; with --check also opencl:cpu and others")
    parser.add_argument("--check", action="store_true", help="compare results at small shapes, and time nothing")
    parser.add_argument("--shape", action="append", help="a shape of moe_layer --list, T,D,F,E,K or targets [targets]")
    parser.add_argument("--dtype", choices=TOLERANCE, help="[bf16; with --check off CUDA f32]")
    parser.add_argument("--router", choices=("even", "zipf", "both"), default="even")
    parser.add_argument("--peers", default="all", help="torch,scattermoe,liger,sonicmoe [all]")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="without CUDA graphs")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="everything as one JSON object")
    options = parser.parse_args()

    if torch is None:
        print("skipped: there is no torch")
        return 77
    path = find_library(options.lib)
    if path is None:
        print("skipped: there is no libmoe.so (--lib)")
        return 77
    lib = Library(path, options.include)
    cuda = options.device.startswith("cuda")
    options.dtype = options.dtype or ("bf16" if cuda else "f32")
    torch.backends.cuda.matmul.allow_tf32 = False
    if not cuda:
        if not options.check:
            parser.error("only CUDA devices are timed; --check compares on others")
        return check(lib, options, None)
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device")
        return 77
    wanted = []
    for name in options.shape or ["targets"]:
        given = re.fullmatch(r"\d+(,\d+){4}", name)
        if name != "targets" and name not in shapes and not given:
            parser.error(f"there is no shape {name}")
        wanted += [(t, shapes[t]) for t in targets] if name == "targets" else [
            ("given", tuple(map(int, name.split(",")))) if given else (name, shapes[name])]

    torch.cuda.set_device(int(options.device.partition(":")[2] or 0))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if options.check:
            return check(lib, options, stream)
        device = Device(lib, options.device, stream)
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        everything = {"bench": "compare_torch", "date": date, "command": " ".join(sys.argv),
                      "device": device.info.name.decode(), "runtime": device.info.driver.decode(),
                      "library": lib.moe_version_string().decode(), "torch": torch.__version__, "dtype": options.dtype,
                      "rounds": options.rounds, "shapes": []}
        print(f"{device.info.name.decode()} ({device.info.driver.decode()}), libmoe {everything['library']}, torch "
              f"{torch.__version__}, {options.dtype}; medians of {options.rounds} rounds; \"libmoe x\": time over "
              "libmoe's (graphs: over its graph's)")
        right = True
        routers = ("even", "zipf") if options.router == "both" else (options.router,)
        for (name, shape), router in itertools.product(wanted, routers):
            record, good = run_shape(name, shape, router, options, device, stream)
            everything["shapes"].append(record)
            right = right and good
            if options.json:
                pathlib.Path(options.json).write_text(json.dumps(everything, indent=1) + "\n")
        device.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
