"""Records -> predictions, table, plot, and what is said at the end."""

import json

import matplotlib
import model

matplotlib.use("Agg")
from matplotlib import pyplot

DIRECTIONS = ("forward", "backward")
# What issue G asks for, and the best that was published, at EP 8: TFLOP/s of each GPU, uniform
# routing, bf16, 8192 tokens a rank.
GOALS = {
    ("qwen3-30b-a3b", "forward"): (420, 238),
    ("qwen3-30b-a3b", "backward"): (400, 211),
    ("mixtral-8x7b", "forward"): (620, 548),
    ("mixtral-8x7b", "backward"): (580, 431),
}


def write_records(records, folder):
    (folder / "records.json").write_text(json.dumps(records, separators=(",", ":")) + "\n")


def progress(record):
    head = "{model} {precision} {routing} ep {ep}".format(**record)
    if "digest" in record or "error" in record:
        return f"digests {head}: {record.get('error') or 'y ' + record['digest']['y']}"
    parts = []
    for direction in DIRECTIONS:
        for key in ("measured_ms", "products_ms"):
            if key in record.get(direction, {}):
                parts.append(f"{direction} {key.replace('_', ' ')} {record[direction][key]:.3f}")
    return f"{head}: " + ", ".join(parts + record["errors"])


def tflops(facts, ms):
    return facts["operations"] / ms / 1e9


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def predict(cases):
    """Adds predicted_ms to all cases but those of the least EP degree that was measured; error (of
    the prediction, relative) where both are there, elsewhere that of the greatest such degree."""
    groups = {}
    for case in cases:
        groups.setdefault((case["model"], case["precision"], case["routing"]), []).append(case)
    for (_, precision, _), group in groups.items():
        rates = model.RATES[precision]
        for direction in DIRECTIONS:
            known = sorted((c for c in group if direction in c), key=lambda c: c["ep"])
            measured = [c[direction] for c in known if "measured_ms" in c[direction]]
            if not measured:
                continue
            base = measured[0]
            efficiency = model.efficiency(works(base), rates, base["slowest_gpu_ms"] / 1e3)
            error = None
            for case in known:
                facts = case[direction]
                if facts is base:
                    continue
                facts["predicted_ms"] = 1e3 * model.time_s(works(facts), rates, efficiency)
                if "measured_ms" in facts:
                    error = facts["predicted_ms"] / facts["measured_ms"] - 1
                    facts["error"], facts["error_ep"] = error, case["ep"]
            last = max(
                (f for f in measured if "error" in f), key=lambda f: f["error_ep"], default={}
            )
            for case in known:
                if "measured_ms" not in case[direction] and last:
                    case[direction]["error"] = last["error"]
                    case[direction]["error_ep"] = last["error_ep"]


def works(facts):
    return [model.Work(**w) for w in facts["works"]]


def cells(case, direction):
    """One line of a direction's table."""
    facts = case.get(direction)
    head = [case["model"], case["precision"], case["routing"], str(case["ep"])]
    if facts is None:
        return [*head, "no result", *[""] * 6]
    measured, predicted = facts.get("measured_ms"), facts.get("predicted_ms")
    ms = measured or predicted
    if ms is None:
        return [*head, "no result", *[""] * 6]
    products = facts.get("products_ms")
    if measured:
        note = (
            "calibrated here" if predicted is None else f"{predicted:.3f} ({facts['error']:+.1%})"
        )
    elif "error" in facts:
        note = f"error at EP {facts['error_ep']}: {facts['error']:+.1%}"
    else:
        note = "not checked"
    bytes_ = facts["link_bytes"]
    return [
        *head,
        f"{ms:.3f}" if measured else f"{ms:.3f} predicted",
        number(tflops(facts, ms)),
        f"{products:.3f}" if products else "-",
        f"{ms / products:.2f}" if products else "-",
        number(bytes_ / 1e6),
        number(bytes_ / ms / 1e6),
        note,
    ]


def markdown(head, lines):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *lines])


def times_table(cases, direction):
    head = ["model", "precision", "routing", "EP", "ms", "TFLOP/s a GPU", "products ms", "ratio",
            "NVLink MB a GPU", "GB/s", "model ms (error)"]  # fmt: skip
    return markdown(head, [cells(case, direction) for case in cases])


def digests_table(digests):
    eps = sorted({d["ep"] for d in digests})
    rows = {}
    for d in digests:
        rows.setdefault((d["model"], d["precision"], d["routing"]), {})[d["ep"]] = d
    head = ["model", "precision", "routing", *(f"EP {ep}" for ep in eps)]
    lines = [[*k, *(same_bits(row, row.get(ep)) for ep in eps)] for k, row in rows.items()]
    return markdown(head, lines)


def same_bits(row, digest):
    if digest is None or "error" in digest:
        return "not run" if digest is None else "no result"
    first = row[min(row)]
    if "digest" not in first:
        return "nothing to compare with"
    if digest is first:
        return "y " + digest["digest"]["y"]
    other = [name for name, bits in digest["digest"].items() if bits != first["digest"][name]]
    return ("OTHER BITS: " + ", ".join(other) if other else "same") + (
        ", virtual ranks" if digest["virtual"] else ""
    )


def goals(cases):
    lines = []
    for case in cases:
        if case["ep"] != 8 or case["routing"] != "uniform" or case["precision"] != "bf16":
            continue
        for direction in DIRECTIONS:
            goal = GOALS.get((case["model"], direction))
            facts = case.get(direction, {})
            ms = facts.get("measured_ms") or facts.get("predicted_ms")
            if goal is None or ms is None or case["tokens"] != 8192:
                continue
            said = f"{tflops(facts, ms):.0f} TFLOP/s a GPU"
            if "measured_ms" not in facts:
                said += " predicted"
                if "error" in facts:
                    with_error = tflops(facts, ms / (1 + facts["error"]))
                    said += f" ({with_error:.0f} if the error at EP {facts['error_ep']} stays)"
            said += f"; goal {goal[0]}, best published {goal[1]}"
            lines.append(f"{case['model']}, {direction}, EP 8: {said}")
    return lines


def failures(records):
    lines = []
    for kind in ("cases", "digests"):
        for r in records[kind]:
            errors = r["errors"] if kind == "cases" else [r["error"]] if "error" in r else []
            head = "{model} {precision} {routing} ep {ep}".format(**r)
            lines += [f"{'digests of ' if kind == 'digests' else ''}{head}: {e}" for e in errors]
    return lines


def machine(records):
    info = records["mok"]
    gpus = [g["name"] for g in info["cuda"]["gpus"]]
    names = ", ".join(f"{gpus.count(n)} x {n}" for n in sorted(set(gpus)))
    return f"{names or info['cpu']['name']}, mok {info['version']}, {records['date']}"


def text(records):
    parts = [f"{machine(records)}, device {records['device']}"]
    for direction in DIRECTIONS:
        parts += [f"### {direction.capitalize()}", times_table(records["cases"], direction)]
    if records["digests"]:
        head = f"### Bits, {records['digest_tokens']} tokens of all ranks"
        parts += [head, digests_table(records["digests"])]
    for head, lines in (
        ("Goals", goals(records["cases"])),
        ("Without a result", failures(records)),
    ):
        if lines:
            parts += [f"### {head}", "\n".join(f"* {line}" for line in lines)]
    return "\n\n".join(parts) + "\n"


def plot(records, path):
    cases = records["cases"]
    models = list(dict.fromkeys(c["model"] for c in cases))
    figure, axes = pyplot.subplots(
        2, len(models), figsize=(3.6 * len(models), 6), squeeze=False, sharex=True
    )
    kinds = list(dict.fromkeys((c["precision"], c["routing"]) for c in cases))
    for column, name in enumerate(models):
        for axis, direction in zip(axes[:, column], DIRECTIONS, strict=True):
            for kind, color in zip(kinds, pyplot.cm.tab10.colors, strict=False):
                shown = [
                    c for c in cases
                    if c["model"] == name and direction in c
                    and (c["precision"], c["routing"]) == kind
                ]  # fmt: skip
                curve(axis, shown, direction, kind, color)
            if (name, direction) in GOALS and records["device"] == "cuda":
                axis.plot([8], [GOALS[name, direction][0]], "k*", ms=9, label="goal")
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({c["ep"] for c in cases}))
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.set_title(f"{name}, {direction}", fontsize=9)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("EP")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s a GPU")
    by_label = {}
    for axis in axes.flat:
        by_label |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.06 + 0.025 * (len(by_label) // 5), 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def curve(axis, cases, direction, kind, color):
    label = " ".join(kind)
    for key, style, what in (
        ("measured_ms", "o-", "measured"),
        ("predicted_ms", "o--", "predicted"),
        ("products_ms", ":", "products alone"),
    ):
        points = [(c["ep"], tflops(c[direction], c[direction][key]))
                  for c in cases if key in c[direction]]  # fmt: skip
        if points:
            filled = {} if key == "measured_ms" else {"mfc": "none"}
            axis.plot(*zip(*sorted(points), strict=True), style, color=color, ms=5,
                      label=f"{label}, {what}", **filled)  # fmt: skip


def write(records, folder):
    """Returns the exit code."""
    write_records(records, folder)
    predict(records["cases"])
    said = text(records)
    (folder / "table.md").write_text(said)
    plot(records, folder / "scaling.png")
    print(said)
    return 1 if failures(records) or "OTHER BITS" in said else 0
