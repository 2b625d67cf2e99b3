"""serving_records - what benchmark_serving keeps of its sessions, and the tables and the picture of it.

A record is of one KV format: the sessions that measured it (machine, commit, settings, plan, kernels), the
rows, each with the number of its session, what was asked last, and the last session's answers.

SPDX-License-Identifier: Apache-2.0
"""
import itertools
import json
import os
import re
import shlex
import sys
import textwrap

GREEDY_TOKENS = 32


# --- workloads: (prompt, answer, depth, concurrency) ---

def runs_asked(command):
    """{workload: its runs} of what a record was asked last, in the order of its grid."""
    asked = {}
    for word in command["grid"]:
        pp, tg, depth, concurrency, *runs = [[int(n) for n in axis.split(",")] for axis in word.split("/")]
        for d, p, t, c in itertools.product(depth, pp, tg, concurrency):
            asked[p, t, d, c] = max(asked.get((p, t, d, c), 0), runs[0][0] if runs else command["runs"])
    return asked


def workload_of(row):
    return row["prompt_size"], row["response_size"], row["context_size"], row["concurrency"]


def name_of(workload):
    return "pp{} tg{} @ d{} c{}".format(*workload)


def lacking(asked, rows):
    """{workload: its runs} of those that the rows do not have."""
    have = {workload_of(row): row["runs"] for row in rows}
    return {w: runs for w, runs in asked.items() if have.get(w, 0) < runs}


# --- files ---

def record_path(args, setting):
    return os.path.join(args.out, setting + ".json")


def write_record(args, record):
    """Whole or not at all: the old one stays until the new one is there."""
    path = record_path(args, record["setting"])
    with open(path + ".new", "w") as file:
        json.dump(record, file, indent=1)
    os.replace(path + ".new", path)


def read_record(args, setting):
    """None when there is none."""
    if not os.path.exists(record_path(args, setting)):
        return None
    with open(record_path(args, setting)) as file:
        return json.load(file)


def newest(record):
    """The machine of the last session."""
    return record["sessions"][-1]["machine"]


def machine_of(record, row):
    return record["sessions"][row["behind"]["session"]]["machine"]


def session_file(setting, number, what):
    return f"{setting}.{number + 1}.{what}.txt"


# --- how far the answers agree ---

def agreement(base, other):
    """Of a setting beside the base."""
    same = [sum(1 for _ in zip_while_equal(a, b)) for a, b in zip(base["greedy"], other["greedy"])]
    pairs = list(zip(base["forced"], other["forced"]))
    return {"greedy_match": same,
            "same_top": sum(a[0] == b[0] for a, b in pairs) / len(pairs),
            "mean_nll_change": sum(a[1] - b[1] for a, b in pairs) / len(pairs)}


def zip_while_equal(a, b):
    for pair in zip(a, b):
        if pair[0] != pair[1]:
            return
        yield pair


# --- tables and the picture ---

def mean_of(row):
    """Decode t/s; 0 where none was measured."""
    return ((row or {}).get("tg_throughput") or {}).get("mean") or 0


def cell(figure, scale=1.0):
    """mean ± deviation (CV)."""
    if figure is None or not figure.get("values"):
        return "–"
    mean, deviation = figure["mean"] * scale, figure["std"] * scale
    return f"{mean:.1f} ± {deviation:.1f} ({100 * deviation / mean if mean else 0:.1f} %)"


def first_words(result):
    machine, asked = newest(result), result["asked"]
    text = (f"`scripts/benchmark_serving {shlex.join(asked['arguments'])}`, each row by the build of its commit; "
            f"mean ± deviation (CV) of each row's runs by {machine['client']}. Rates are of all requests "
            "together. The name of a format leads to the record of its sessions, `figures` to what the server "
            "counted in the row's, `profile` to where a step's time goes on a GPU.")
    if machine["workload"]["model"].startswith("random:"):
        text += " Weights are random: their likeliest tokens are near ties, which any rounding turns."
    return textwrap.wrap(text, 115, break_long_words=False, break_on_hyphens=False)


def rows_by_workload(results):
    """[(workload, [the row of each result, or None])], as the grid asks, then what else was measured."""
    have = [{workload_of(row): row for row in r["rows"]} for r in results]
    every = dict.fromkeys([*runs_asked(results[0]["asked"]), *itertools.chain(*have)])
    rows = [(w, [h.get(w) for h in have]) for w in every]
    return [(w, of) for w, of in rows if any(of)]


def what_lacks(args, results):
    """A line for the formats whose records lack the same of what was asked."""
    asked, have = runs_asked(results[0]["asked"]), {r["setting"]: r["rows"] for r in results}
    lack = {}
    for setting in args.kv.split(","):
        lack.setdefault(tuple(map(name_of, lacking(asked, have.get(setting, [])))), []).append(setting)
    for names, settings in lack.items():
        if names:
            yield f"Not measured with {' and '.join(settings)}, {len(names)} of {len(asked)}: {', '.join(names)}."


def beside(base, other, of_one_program):
    """Decode t/s of a row over those of the base's."""
    both = of_one_program and mean_of(base) and mean_of(other)
    return f"{mean_of(other) / mean_of(base):.3f}" if both else "–"


def row_line(workload, result, row, ratio, to):
    number = row["behind"]["session"]
    session, setting = result["sessions"][number], result["setting"]
    build = session["machine"]["commit"][:7]
    told = f"[figures]({to}{session_file(setting, number, 'metrics')})"
    if session["profile"]:
        told += f", [profile]({to}{session['profile']})"
    return (f"| {name_of(workload)} | [{setting}]({to}{setting}.json) ({told}) | {build} | {row['runs']} | "
            f"{cell(row['pp_throughput'])} | {cell(row['tg_throughput'])} | {ratio} | {cell(row['e2e_ttft'])} |")


def tables(args, results, to):
    """Lines; `to` is where the records lie beside the file that they go to."""
    base = results[0]
    lines = [*first_words(base), "", f"![speed]({to}speed.svg)", "",
             "| workload | KV | build | runs | prefill t/s | decode t/s | beside " + base["setting"] +
             " | first token ms |", "|---|---|---|---|---|---|---|---|"]
    for workload, rows in rows_by_workload(results):
        programs = [row and machine_of(r, row)["program_sha256"] for r, row in zip(results, rows)]
        lines += [row_line(workload, r, row, beside(rows[0], row, program == programs[0]), to)
                  for r, row, program in zip(results, rows, programs) if row]
    for line in what_lacks(args, results):
        lines += ["", *textwrap.wrap(line, 115, break_long_words=False)]
    lines += ["", f"| KV beside {base['setting']} | build | greedy tokens that match, of {GREEDY_TOKENS} | "
              f"same likeliest token, of {len(base['forced'])} | change of mean NLL |",
              "|---|---|---|---|---|"]
    for r in results[1:]:
        if newest(r)["program_sha256"] == newest(base)["program_sha256"]:
            a = agreement(base, r)
            matches = ", ".join(map(str, a["greedy_match"]))
            lines.append(f"| {r['setting']} | {newest(r)['commit'][:7]} | {matches} | "
                         f"{100 * a['same_top']:.2f} % | {a['mean_nll_change']:+.5f} |")
    return lines


def write_section(path, title, lines):
    """The section of that title is these lines, in its place or at the end."""
    sections = []
    if os.path.exists(path):
        with open(path) as file:
            sections = re.split(r"^(?=## )", file.read(), flags=re.M)
    section = f"## {title}\n\n" + "\n".join(lines) + "\n"
    at = [i for i, s in enumerate(sections) if s.startswith(f"## {title}\n")]
    if at:
        sections[at[0]] = section + ("\n" if at[0] + 1 < len(sections) else "")
    else:
        sections.append(("\n" if sections else "") + section)
    with open(path, "w") as file:
        file.write("".join(sections))


def write_picture(args, results):
    """Decode t/s of every workload, a bar for each format; a workload's longest bar is full."""
    colours = ("#7f8ea3", "#1764c0", "#d97f0a", "#3a8a4d")
    bar, left, width = 14, 230, 420
    parts, y = [], 30
    for workload, rows in rows_by_workload(results):
        most = max(map(mean_of, rows)) or 1
        parts.append(f'<text x="{left - 8}" y="{y + bar}" text-anchor="end">{name_of(workload)}</text>')
        for k, (r, row) in enumerate(zip(results, rows)):
            mean = mean_of(row)
            parts.append(f'<rect x="{left}" y="{y}" width="{width * mean / most:.1f}" '
                         f'height="{bar - 2}" fill="{colours[k % len(colours)]}"/>'
                         f'<text x="{left + width * mean / most + 4:.1f}" y="{y + bar - 3}">'
                         f'{mean:.1f} {r["setting"]}</text>')
            y += bar
        y += 8
    with open(os.path.join(args.out, "speed.svg"), "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 130}" '
                   f'height="{y}" font-family="sans-serif" font-size="11"><text x="8" y="18">'
                   "decode, tokens/s of all requests together</text>" + "".join(parts) + "</svg>\n")


def write_tables(args):
    """Of the records in --out, as far as they go."""
    settings = args.kv.split(",")
    results = [r for r in (read_record(args, setting) for setting in settings) if r]
    if not results or results[0]["setting"] != settings[0]:
        sys.exit(f"benchmark_serving: {record_path(args, settings[0])} is not there: nothing to compare with")
    to = os.path.relpath(args.out, os.path.dirname(args.into) or ".")
    lines = tables(args, results, "" if to == "." else to + "/")
    model = args.model.rstrip("/").split("/")[-1]
    write_section(args.into, f"Serving {model}, one KV format beside another", lines)
    write_picture(args, results)
    print("\n".join(lines))
