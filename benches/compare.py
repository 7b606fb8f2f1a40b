#!/usr/bin/env python3
"""Our benchmark beside other implementations' from the same run: Markdown tables and SVG charts.

    compare.py --ours ours.jsonl [ours-models.json ...] [--peers peers.jsonl] [--out DIR]

ours    files of `mamba2 bench --json`, or lines {"item": name, "result": such a file} as benches/gpu.sh collects them
peers   JSON lines {impl, shape: "batch,seqlen,ngroups,nheads,dstate,headdim,chunk", us}; the fastest chunk of each impl
        counts. An impl whose name ends in -step is a decode step (seqlen 1).
DIR     gets table.md, chart.svg (times over the limit), sweep.svg (time by seqlen and dstate) and decode.svg (share of copy
        speed), each only if there is data for it. Without it the tables are printed and nothing is written.

Only Python's standard library is needed.
"""
import argparse
import json
import math
import os
import re

OURS, PEERS, LIMIT = "#2a6f97", ("#c8553d", "#f2a65a", "#8d99ae"), "#555"


def axes(shape):
    """(batch, seqlen, ngroups, nheads, dstate, headdim) of a shape's text; a decode step has seqlen 1."""
    values = dict(re.findall(r"(\w+)=([\w.]+)", shape))
    return tuple(int(values.get(k, 1)) for k in ("b", "l", "g", "h", "n", "p"))


class Results:
    """Rows by kind. Of a shape that was timed twice the later time counts."""

    def __init__(self):
        self.forward, self.decode = {}, {}
        self.options, self.host, self.first = [], [], []

    def read(self, path):
        if not os.path.exists(path):
            return
        with open(path) as file:
            text = file.read()
        if path.endswith(".jsonl"):
            for line in filter(None, text.splitlines()):
                entry = json.loads(line)
                self.take(entry["item"], entry["result"])
        else:
            self.take(os.path.basename(path), json.loads(text))

    def take(self, item, document):
        kind, rows = document.get("kind", "time"), document["rows"]
        if kind == "host_cost":
            self.host += rows
        elif kind == "first_call":
            self.first += rows
        elif any(row.get("plain_us") for row in rows):
            self.options.append((item, rows))
        else:
            for row in rows:
                to = self.decode if row["shape"].startswith("step:") else self.forward
                to[axes(row["shape"])] = row


def read_peers(path):
    """impl -> shape -> microseconds."""
    best = {}
    if path and os.path.exists(path):
        with open(path) as file:
            for row in map(json.loads, filter(None, file.read().splitlines())):
                if "us" in row:
                    key = tuple(map(int, row["shape"].split(",")))[:6]
                    times = best.setdefault(row["impl"], {})
                    times[key] = min(times.get(key, math.inf), row["us"])
    return best


def markdown(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def number(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


def forward_table(forward, peers):
    head = ["batch, seqlen, ngroups, nheads, dstate, headdim", "limit us", "ours us", "x limit"]
    for impl in peers:
        head += [f"{impl} us", "x ours"]
    rows, ratios = [], {impl: [] for impl in peers}
    for key, row in forward.items():
        ours, limit = row["median_us"], row.get("limit_us")
        cells = [", ".join(map(str, key)), number(limit, 1), number(ours, 1), number(limit and ours / limit, 1)]
        for impl in peers:
            us = peers[impl].get(key)
            cells += [number(us, 1), number(us and us / ours, 2)]
            if us:
                ratios[impl].append(us / ours)
        rows.append(cells)
    text = markdown(head, rows)
    for impl, r in ratios.items():
        if r:
            mean = math.exp(sum(map(math.log, r)) / len(r))
            text += (f"\nGeometric mean over {len(r)} shapes: {mean:.2f} times as fast as {impl}; least {min(r):.2f}, "
                     f"most {max(r):.2f}.\n")
    return text


def decode_table(decode, peers):
    head = ["decode: batch, nheads, headdim, ngroups, dstate", "ours us", "GB/s", "of copy", "x limit", "empty kernel us"]
    for impl in peers:
        head += [f"{impl} us", "of copy", "x ours"]
    rows = []
    for key, row in decode.items():
        b, _, g, h, n, p = key
        ours, limit, copy = row["median_us"], row.get("limit_us"), row.get("copy_gb_s")
        cells = [f"{b}, {h}, {p}, {g}, {n}", number(ours, 1), number(row.get("gb_s"), 0), number(row.get("of_copy"), 3),
                 number(limit and ours / limit, 2), number(row.get("empty_kernel_us"), 1)]
        for impl in peers:
            us = peers[impl].get(key)
            cells += [number(us, 1), number(us and copy and row["bytes"] / us / 1e3 / copy, 3), number(us and us / ours, 2)]
        rows.append(cells)
    return markdown(head, rows)


def other_tables(results):
    text = ""
    for item, rows in results.options:
        text += "\n" + markdown(
            [f"options ({item})", "us", "over plain and own traffic"],
            [[row["shape"], number(row["median_us"], 1), number(row.get("over_plain"), 3)] for row in rows])
    if results.host:
        text += "\n" + markdown(
            ["host cost of a call", "launches", "median us", "min us", "max us", "floor us", "floor a launch", "own us", "late / early", "as graph us"],
            [[row["shape"], str(row["launches"])]
             + [number(row.get(k), 2) for k in ("host_us", "host_min_us", "host_max_us", "floor_us", "floor_a_launch_us", "own_us",
                                                "late_over_early", "graph_us")]
             for row in results.host])
    if results.first:
        text += "\n" + markdown(
            ["new process to first result, cached kernels", "own ms", "CUDA start ms", "in all ms", "first process ms"],
            [[row["shape"]] + [number(row[k], 0) for k in ("own_ms", "cuda_ms", "total_ms")]
             + [number(row["first_process"]["total_ms"], 0)] for row in results.first])
    return text


class Svg:
    def __init__(self, width, height):
        self.head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        self.parts = ['<rect width="100%" height="100%" fill="white"/>']

    def text(self, x, y, text, **attributes):
        self.add("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)

    def line(self, x1, y1, x2, y2, color="#ddd"):
        self.add("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", stroke=color)

    def box(self, x, y, width, height, color):
        self.add("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=f"{height:.1f}", fill=color)

    def curve(self, points, color, dash=""):
        self.add("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", stroke=color,
                 stroke_width="2", stroke_dasharray=dash)
        for x, y in points:
            self.add("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="2.5", fill=color)

    def add(self, tag, content="", **attributes):
        pairs = " ".join(f'{key.replace("_", "-")}="{value}"' for key, value in attributes.items() if value != "")
        self.parts.append(f"<{tag} {pairs}>{content}</{tag}>" if content else f"<{tag} {pairs}/>")

    def legend(self, x, y, entries):
        for name, color in entries:
            self.box(x, y, 10, 10, color)
            self.text(x + 14, y + 9, name)
            x += 30 + 7 * len(name)

    def done(self):
        return "\n".join([self.head] + self.parts + ["</svg>"]) + "\n"


def bars(title, rows, series, most, ticks, scale, label):
    """Horizontal bars. rows: (key, name); series: (name, color, key -> value); label(key, value, series index)."""
    bar, gap, left, width = 9, 10, 250, 560
    height = len(rows) * (bar * len(series) + gap) + 60
    svg = Svg(left + width + 80, height)
    x = lambda value: left + width * scale(value) / scale(most)
    svg.text(left, 14, title)
    svg.legend(left + 340, 5, [(name, color) for name, color, _ in series])
    for tick in ticks:
        if tick <= most:
            svg.line(x(tick), 22, x(tick), height - 24)
            svg.text(x(tick), height - 10, f"{tick:g}", text_anchor="middle")
    y = 28
    for key, name in rows:
        svg.text(left - 8, y + bar * len(series) / 2 + 4, name, text_anchor="end")
        for _, color, values in series:
            if key in values:
                svg.box(left, y, x(values[key]) - left, bar - 1, color)
                svg.text(x(values[key]) + 4, y + bar - 1, label(key, values[key]), font_size="9")
            y += bar
        y += gap
    return svg.done()


def limit_chart(forward, peers):
    """Time over the limit, logarithmic: 1 is the limit."""
    limits = {k: r["limit_us"] for k, r in forward.items() if r.get("limit_us")}
    if not limits:
        return None
    over = lambda times: {k: us / limits[k] for k, us in times.items() if k in limits}
    series = [("ours", OURS, over({k: r["median_us"] for k, r in forward.items()}))]
    series += [(impl, color, over(times)) for (impl, times), color in zip(peers.items(), PEERS)]
    names = [(k, "b={} l={} h={} p={} g={} n={}".format(k[0], k[1], k[3], k[5], k[2], k[4])) for k in limits]
    most = max([v for _, _, values in series for v in values.values()] + [10])
    return bars("time as a multiple of the physical limit (logarithmic)", names, series, most, (1, 2, 3, 5, 10, 20, 50),
                lambda v: math.log(max(v, 1)), lambda key, v: f"{v * limits[key]:.0f} us")


def decode_chart(decode, peers):
    """Bytes of the state a second, over those of a copy in the same run."""
    share = {k: r["bytes"] / 1e3 / r["copy_gb_s"] for k, r in decode.items() if r.get("copy_gb_s")}
    if not share:
        return None
    of = lambda times: {k: share[k] / us for k, us in times.items() if k in share}
    series = [("ours", OURS, of({k: r["median_us"] for k, r in decode.items()}))]
    series += [(impl, color, of(times)) for (impl, times), color in zip(peers.items(), PEERS)]
    names = [(k, "b={} h={} p={} g={} n={}".format(k[0], k[3], k[5], k[2], k[4])) for k in share]
    return bars("decode step: share of the speed of a copy", names, series, 1.0, (0, 0.25, 0.5, 0.75, 1), lambda v: v,
                lambda key, v: f"{100 * v:.0f} %, {share[key] / v:.1f} us")


def sweep_chart(forward, peers):
    """Time by seqlen, one panel for each dstate, of the shapes that differ in these only; both axes logarithmic."""
    families = {}
    for b, l, g, h, n, p in forward:
        families.setdefault((b, g, h, p), set()).add((l, n))
    family, members = max(families.items(), key=lambda f: len(f[1]), default=(None, ()))
    lengths, states = sorted({l for l, _ in members}), sorted({n for _, n in members})
    if len(lengths) < 3:
        return None
    key = lambda l, n: (family[0], l, family[1], family[2], n, family[3])
    series = [("ours", OURS, "", {k: r["median_us"] for k, r in forward.items()})]
    series += [(impl, color, "", times) for (impl, times), color in zip(peers.items(), PEERS)]
    series.append(("limit", LIMIT, "4 3", {k: r["limit_us"] for k, r in forward.items() if r.get("limit_us")}))
    values = [t[key(l, n)] for _, _, _, t in series for l in lengths for n in states if key(l, n) in t]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    width, height, left, top, gap = 200, 230, 55, 50, 36
    svg = Svg(left + len(states) * (width + gap), top + height + 40)
    svg.text(left, 16, "microseconds by seqlen (both logarithmic), b={} h={} p={} g={}".format(family[0], family[2], family[3], family[1]))
    svg.legend(left + 400, 7, [(name, color) for name, color, _, _ in series])
    for panel, n in enumerate(states):
        x0 = left + panel * (width + gap)
        x = lambda l: x0 + width * math.log(l / lengths[0]) / math.log(lengths[-1] / lengths[0])
        y = lambda us: top + height * (high - math.log10(us)) / (high - low)
        svg.text(x0 + width / 2, top - 8, f"dstate {n}", text_anchor="middle")
        for decade in range(low, high + 1):
            svg.line(x0, y(10**decade), x0 + width, y(10**decade))
            if panel == 0:
                svg.text(x0 - 6, y(10**decade) + 4, f"{10**decade:,}", text_anchor="end")
        for l in lengths:
            svg.line(x(l), top, x(l), top + height)
            svg.text(x(l), top + height + 14, f"{l // 1024}k" if l >= 1024 else str(l), text_anchor="middle")
        for _, color, dash, times in series:
            points = [(x(l), y(times[key(l, n)])) for l in lengths if key(l, n) in times]
            if points:
                svg.curve(points, color, dash)
    return svg.done()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", nargs="+", required=True)
    parser.add_argument("--peers")
    parser.add_argument("--out")
    args = parser.parse_args()
    results, peers = Results(), read_peers(args.peers)
    for path in args.ours:
        results.read(path)
    of_steps = {impl: times for impl, times in sorted(peers.items()) if impl.endswith("-step")}
    of_forward = {impl: times for impl, times in sorted(peers.items()) if not impl.endswith(("-step", "-bwd"))}
    text = ""
    if results.forward:
        text += forward_table(results.forward, of_forward)
    if results.decode:
        text += ("\n" if text else "") + decode_table(results.decode, of_steps)
    text += other_tables(results)
    print(text)
    if args.out:
        os.makedirs(args.out, exist_ok=True)
        charts = {
            "chart.svg": limit_chart(results.forward, of_forward),
            "sweep.svg": sweep_chart(results.forward, of_forward),
            "decode.svg": decode_chart(results.decode, of_steps),
        }
        for name, content in [("table.md", text), *charts.items()]:
            if content:
                with open(os.path.join(args.out, name), "w") as file:
                    file.write(content)


if __name__ == "__main__":
    main()
