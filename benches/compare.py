#!/usr/bin/env python3
"""Our benchmark beside other implementations' from the same run: a Markdown table and an SVG chart.

    compare.py --ours ours-seed.json ours-models.json --peers peers.jsonl --out DIR

ours    files of `mamba2 bench --json`
peers   JSON lines {impl, shape: "batch,seqlen,ngroups,nheads,dstate,headdim,chunk", us}; the fastest chunk of each impl counts
DIR     table.md and chart.svg are written there. Only Python's standard library is needed.
"""
import argparse
import json
import math
import os
import re


def key_of_ours(shape):
    values = dict(re.findall(r"(\w+)=([\w.]+)", shape))
    return tuple(int(values[k]) for k in ("b", "l", "g", "h", "n", "p"))


def read_peers(path):
    best = {}
    if path and os.path.exists(path):
        for line in open(path):
            row = json.loads(line)
            if "us" in row:
                key = tuple(map(int, row["shape"].split(",")))[:6]
                times = best.setdefault(row["impl"], {})
                times[key] = min(times.get(key, math.inf), row["us"])
    return best


def read_ours(paths):
    rows = []
    for path in paths:
        if os.path.exists(path):
            for row in json.load(open(path))["rows"]:
                rows.append((key_of_ours(row["shape"]), row))
    return rows


def table(rows, peers):
    impls = sorted(peers)
    lines = ["| batch, seqlen, ngroups, nheads, dstate, headdim | limit us | ours us | x limit | " + " | ".join(f"{i} us | x ours" for i in impls) + " |"]
    lines.append("|" + "---|" * (4 + 2 * len(impls)))
    ratios = {i: [] for i in impls}
    for key, row in rows:
        ours, limit = row["median_us"], row.get("limit_us")
        cells = [", ".join(map(str, key)), f"{limit:.1f}" if limit else "", f"{ours:.1f}", f"{ours / limit:.1f}" if limit else ""]
        for impl in impls:
            us = peers[impl].get(key)
            cells += [f"{us:.1f}", f"{us / ours:.2f}"] if us else ["", ""]
            if us:
                ratios[impl].append(us / ours)
        lines.append("| " + " | ".join(cells) + " |")
    for impl, r in ratios.items():
        if r:
            mean = math.exp(sum(map(math.log, r)) / len(r))
            lines.append(f"\nGeometric mean over {len(r)} shapes: {mean:.2f} times as fast as {impl}; least {min(r):.2f}, most {max(r):.2f}.")
    return "\n".join(lines) + "\n"


def chart(rows, peers):
    """Bars of time over the limit, logarithmic: 1 is the limit."""
    series = [("ours", "#2a6f97", {k: r["median_us"] for k, r in rows})]
    series += [(i, c, peers[i]) for i, c in zip(sorted(peers), ("#c8553d", "#f2a65a", "#8d99ae"))]
    rows = [(k, r) for k, r in rows if r.get("limit_us")]
    bar, gap, left, width = 9, 10, 250, 560
    height = len(rows) * (bar * len(series) + gap) + 60
    most = max([s[2][k] / r["limit_us"] for k, r in rows for s in series if k in s[2]] + [10])
    x = lambda ratio: left + width * math.log(max(ratio, 1)) / math.log(most)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 70}" height="{height}" font-family="sans-serif" font-size="11">',
           f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="14">time as a multiple of the physical limit (logarithmic)</text>']
    for tick in (1, 2, 3, 5, 10, 20):
        if tick <= most:
            out.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="22" y2="{height - 24}" stroke="#ddd"/><text x="{x(tick):.1f}" y="{height - 10}" text-anchor="middle">{tick}</text>')
    y = 28
    for key, row in rows:
        b, l, g, h, n, p = key
        out.append(f'<text x="{left - 8}" y="{y + bar * len(series) / 2 + 4}" text-anchor="end">b={b} l={l} h={h} p={p} g={g} n={n}</text>')
        for name, color, times in series:
            if key in times:
                ratio = times[key] / row["limit_us"]
                out.append(f'<rect x="{left}" y="{y}" width="{x(ratio) - left:.1f}" height="{bar - 1}" fill="{color}"/><text x="{x(ratio) + 4:.1f}" y="{y + bar - 1}" font-size="9">{times[key]:.0f} us</text>')
            y += bar
        y += gap
    for i, (name, color, _) in enumerate(series):
        out.append(f'<rect x="{left + 320 + i * 90}" y="6" width="10" height="10" fill="{color}"/><text x="{left + 334 + i * 90}" y="15">{name}</text>')
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", nargs="+", required=True)
    parser.add_argument("--peers")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rows, peers = read_ours(args.ours), read_peers(args.peers)
    text = table(rows, peers)
    open(os.path.join(args.out, "table.md"), "w").write(text)
    open(os.path.join(args.out, "chart.svg"), "w").write(chart(rows, peers))
    print(text)


if __name__ == "__main__":
    main()
