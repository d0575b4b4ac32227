#!/usr/bin/env python3
"""performance_doc.py [DOCUMENT] - writes the tables of doc/performance.md again from doc/performance/*.json, which are
the --json files of moe_layer and compare_torch.py.  Only what lies between the two marks below changes.

Files are taken in the order of their names; what one holds is said by its "bench"."""
import json
import pathlib
import sys

BEGIN = "<!-- Tables: written by tests/bench/performance_doc.py from doc/performance/*.json. -->"
END = "<!-- End of the tables. -->"
# Steps that are products, and their operations / (R·D·F).
PRODUCTS = [("forward up", 4), ("forward down", 2), ("backward through down", 2), ("backward down weights", 2),
            ("backward through up", 4), ("backward up weights", 4)]
LAYER = "(T,D,F,E,K = {T},{D},{F},{E},{K})"


def table(head, rows):
    lines = [f"| {' | '.join(row)} |" for row in [head] + rows]
    return lines[:1] + ["|---" * len(head) + "|"] + lines[1:] + [""]


def number(x, digits=1):
    return f"{x:.{digits}f}" if x and x > 0 else "–"


def ratio(a, b):
    return number(a / b if a and b else 0, 2)


def layer_cells(figure):
    ms, bound = figure["ms"]["median"], figure["bound_ms"]["median"]
    return [number(ms, 3), number(figure["tflops"]), ratio(figure["floor_ms"], ms), number(figure["bound_tflops"]),
            ratio(bound, ms)]


def product_cells(s):
    ms = {step["step"].removesuffix(" and activation"): step["ms"] for step in s["steps"]}
    rdf = s["T"] * s["K"] * s["D"] * s["F"]
    return [s["shape"], s["router"]] + [number(1e-9 * n * rdf / ms[label] if label in ms else 0, 0)
                                        for label, n in PRODUCTS]


def layers(shapes):
    lines = []
    head = ["layer", "router", "rows of an expert", "forward ms", "TFLOP/s", "of floor", "bound TFLOP/s", "of bound",
            "whole ms", "backward ms", "TFLOP/s", "of floor", "bound TFLOP/s", "of bound", "f32 gradients ms",
            "kept MiB"]
    rows, graphs = [], []
    for s in shapes:
        by_name = {f["what"]: f for f in s["figures"]}
        f32 = by_name.get("backward, f32 gradients")
        rows.append([f"{s['shape']} {LAYER.format(**s)}", s["router"], f"{s['fewest_rows']} to {s['most_rows']}"]
                    + layer_cells(by_name["forward"]) + [number(by_name["forward"]["whole_ms"]["median"], 3)]
                    + layer_cells(by_name["backward"]) + [number(f32["ms"]["median"], 3) if f32 else "–",
                                                          number(s["kept_mib"])])
        graphs += [[s["shape"], s["router"], what] + layer_cells(f) for what, f in by_name.items() if "graph" in what]
    lines += table(head, rows)
    if graphs:
        lines += ["Replayed CUDA graphs:", ""]
        lines += table(["layer", "router", "", "ms", "TFLOP/s", "of floor", "bound TFLOP/s", "of bound"], graphs)
    steps = [[s["shape"], s["router"], ", ".join(f"{p['step']} {p['ms']:.3f}" for p in s["steps"])] for s in shapes]
    if any(s["steps"] for s in shapes):
        lines += ["The products of a call as steps, TFLOP/s:", ""]
        lines += table(["layer", "router"] + [label for label, _ in PRODUCTS], [product_cells(s) for s in shapes])
    lines += ["Steps of a call, ms (they sum to more than the call, since a time is taken between any two):", ""]
    lines += table(["layer", "router", "steps"], steps)
    return lines


def moe_layer(run):
    shapes = [s for s in run["shapes"] if "figures" in s]
    caches = "L2 cache overwritten before each call" if run["l2_cold"] else "caches as the calls before left them"
    dense = f"; a dense product of 8192³ runs at {run['dense_tflops']:.0f} TFLOP/s" if run["dense_tflops"] else ""
    lines = [f"cuBLAS: {run['cublas']}. {run['dtype']}; {caches}; medians of {run['rounds']} rounds, "
             f"{'CUDA events' if run['cuda_events'] else 'the clock of the host'}. "
             f"A large copy moves {run['copy_gbs']:.0f} GB/s{dense}.", ""]
    if run["scale"] > 1:
        lines += [f"**Tokens divided by {run['scale']}**: no times of the layers themselves.", ""]
    lines += layers(shapes) if shapes else []
    if run.get("ops"):
        lines += table(["operation", "layer", "µs", "GB/s", "of copy", "implementation"],
                       [[o["op"], o["shape"], number(1e3 * o["ms"]["median"]), number(o["gbs"]),
                         ratio(o["gbs"], run["copy_gbs"]), o["impl"]] for o in run["ops"]])
    if run.get("products"):
        lines += table(["product", "layer", "ms", "TFLOP/s", "implementation"],
                       [[o["product"], f"{o['shape']} (D {o['D']}, F {o['F']})", number(o["ms"]["median"], 3),
                         number(o["tflops"]), o["impl"]] for o in run["products"]])
    return lines


def compare_torch(run):
    lines = [f"torch {run['torch']}, {run['dtype']}; L2 cache overwritten before each forward; medians of "
             f"{run['rounds']} rounds, CUDA events.", ""]
    rows = []
    for s in run["shapes"]:
        by_name = {c["name"]: c for c in s["contestants"]}
        for c in s["contestants"]:
            ours = by_name.get("libmoe, graph" if c["name"].endswith(", graph") else "libmoe", {})
            cells = [f"{s['shape']} {LAYER.format(**s)}", s["router"], c["name"]]
            for part in ("forward", "backward"):
                ms = c.get(part + "_ms")
                cells += [number(ms, 3), number(c.get(part + "_tflops")), ratio(ms, ours.get(part + "_ms"))]
            why = (c.get("failed") or c.get("skipped") or "").replace("|", "\\|")
            rows.append(cells + [number(c.get("kept_mib")), why])
    return lines + table(["layer", "router", "", "forward ms", "TFLOP/s", "libmoe ×", "backward ms", "TFLOP/s",
                          "libmoe ×", "kept MiB", ""], rows)


def section(path):
    run = json.loads(path.read_text())
    driver = f"{run['runtime']}, {run['driver']}" if run.get("driver") else run["runtime"]
    return [f"### {path.stem}", "", f"{run['date']}, {run['device']} ({driver}), libmoe {run['library']}; "
            f"`{run['command']}`", ""] + {"moe_layer": moe_layer, "compare_torch": compare_torch}[run["bench"]](run)


def main():
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    document = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "doc" / "performance.md"
    text = document.read_text()
    head, rest = text.split(BEGIN)
    files = sorted((document.parent / "performance").glob("*.json"))
    body = [line for path in files for line in section(path)] or ["No measurement is kept here yet.", ""]
    document.write_text(head + BEGIN + "\n\n" + "\n".join(body) + "\n" + END + rest.split(END)[1])
    print(f"{document}: {len(files)} files")


if __name__ == "__main__":
    main()
