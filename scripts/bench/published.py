"""Prints the results of papers and of measured runs next to ours, and writes them as docs/results/published.

    scripts/python scripts/bench/published.py [--only=gpipe,bloom] [--compute]

The facts are in scripts/bench/papers, a JSON file for each paper: its sources, and tables with rows of a name, the
published value, and ours. `--compute` predicts or simulates ours again, with the module of scripts/bench/papers that a
table names, and writes the files and the page. Tables without a module are of trained runs: their command is in the
table. HEAD names the choices that depend on published values. If a table has at least 20 rows, half of them are held
out, by a hash of their names. All rows are printed; the page of a table with a key `page_groups` has a row for each
value of that key instead.
"""

import datetime
import hashlib
import importlib
import itertools
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpar.command_line import Parser
from jaxpar.errors import UserError, exit_code

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "bench" / "papers"
PAGES = ROOT / "docs" / "results"
PAPERS = ("gpipe", "pipedream", "swarm", "data_parallel", "mpt", "rates", "nanotron", "bloom")
GOAL_15 = ("gpipe", "pipedream", "swarm", "data_parallel")  # the papers whose ratios should be within 15%
FEWEST_HELD_OUT = 20
WIDTH = 100  # of a line of a document
NOTE = "Unless a table names another command, ours is computed ({computed}) by"
HEAD = """# Published results

Each page has what a paper or a project published, *ours*, and the ratio ours / published. Ours is
what jaxpar simulates, predicts or trains for the same case. Tables with 0 rows have only our
values. A hash of the names splits tables of 20 rows or more into *held out* and *others*, with the
errors of each.

The goal is an error of at most 15%: {within} of the {rows} rows of GPipe, PipeDream, SWARM and data
parallelism reach it. For language models, the goals were a median error of 12% (25% where
computation waits for all-gathers) and a rank correlation (Kendall's tau) of 0.8. Only Megatron-LM
with a tensor axis meets the goal for the error.

These choices depend on published values. SWARM's generated trace was fitted to the first row of its
table. QAdam's warm-up, the method for BLOOM and the matmul efficiency of A100s were chosen after
their rows had been seen.

`scripts/python scripts/bench/published.py` prints the tables. With `--compute --only=gpipe`, it
computes those of one paper again, and writes these pages.
"""


def main() -> None:
    """Print the tables, after computing them if asked."""
    parser = Parser(__doc__)
    parser.add_argument("--only", default=",".join(PAPERS), help=f"some of {', '.join(PAPERS)}")
    parser.add_argument("--compute", action="store_true", help="predict and simulate again, and write the page")
    arguments = parser.parse()
    names = arguments.only.split(",")
    if unknown := set(names).difference(PAPERS):
        raise UserError(f"--only is {arguments.only}; it must not have {min(unknown)}, but some of {', '.join(PAPERS)}")
    for name in names:
        paper = read(name)
        if arguments.compute:
            compute(paper)
            (FOLDER / f"{name}.json").write_text(format_json(paper) + "\n")
        print(format_paper(paper, with_all_rows=True))
    if arguments.compute:
        for name, text in pages().items():
            (PAGES / name).write_text(text)


def read(name: str) -> dict[str, Any]:
    """Return the facts of a paper."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def compute(paper: dict[str, Any]) -> None:
    """Replace ours in the tables that have a module, and the version of JAX and the date."""
    paper["computed"] = f"jax {jax.__version__}, {datetime.date.today()}"
    for table in paper["tables"]:
        if "module" in table:
            module = importlib.import_module(f"scripts.bench.papers.{table['module']}")
            for row, value in zip(table["rows"], module.values(table), strict=True):
                if value is None:  # it cannot be computed
                    continue
                number, *found = value if isinstance(value, tuple) else (value,)
                row["ours"] = float(f"{number:.4g}")
                row.update(zip(["found"], found, strict=False))


def pages() -> dict[str, str]:
    """Return the text of each page by its path: the errors of each table, and a page of each paper."""
    papers = {name: read(name) for name in PAPERS}
    tables = [table for name in GOAL_15 for table in papers[name]["tables"]]
    errors = [error for table in tables for error in errors_of(compared_rows(table["rows"]))]
    within = sum(error <= 0.15 for error in errors)
    head = HEAD.format(rows=len(errors), within=within)
    lines = [rewrapped(head), "| Paper and table | Rows | Median error | Within 15% |", "|---|---:|---:|---:|"]
    for name, paper in papers.items():
        for table in paper["tables"]:
            errors = errors_of(compared_rows(table["rows"]))
            found = (
                [f"{statistics.median(errors):.1%}", str(sum(error <= 0.15 for error in errors))]
                if errors
                else ["", ""]
            )
            lines.append(f"| [{table['title']}](published/{name}.md) | {len(errors)} | {' | '.join(found)} |")
    of_papers = {f"published/{name}.md": format_paper(paper) + "\n" for name, paper in papers.items()}
    return {"published.md": "\n".join(lines) + "\n", **of_papers}


def format_json(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each row of a table."""
    if depth == 4 or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        parts, (start, end) = [format_json(part, depth + 1) for part in value], "[]"
    else:
        parts, (start, end) = (
            [f"{json.dumps(name)}: {format_json(part, depth + 1)}" for name, part in value.items()],
            "{}",
        )
    lines = [f"{' ' * depth} {part}" for part in parts]
    return f"{start}\n" + ",\n".join(lines) + f"\n{' ' * depth}{end}" if lines else start + end


def format_paper(paper: Mapping[str, Any], *, with_all_rows: bool = False) -> str:
    """Return the page of a paper in Markdown. with_all_rows: also those that the page groups."""
    usual = statistics.mode(table["command"] for table in paper["tables"])
    lines = [f"# {paper['title']}", "", rewrapped(paper["text"]), f"{NOTE.format(**paper)}\n`{usual}`.", ""]
    for table in paper["tables"]:
        command = "" if table["command"] == usual else f", by\n`{table['command']}`"
        lines += [f"## {table['title']}", "", f"{table['how']}{command or '.'}", ""]
        if "page_groups" in table and not with_all_rows:
            lines += format_groups(table)
        else:
            lines += [f"| Case | Published{_unit(table)} | Ours | Ours / published |", "|---|---|---|---|"]
            names = (row["name"].removeprefix(f"{paper['title']}: ") for row in table["rows"])
            lines += [f"| {name} | {' | '.join(_cells(row))} |" for name, row in zip(names, table["rows"], strict=True)]
        found = summary(table["rows"])
        lines += ["", *found, *([""] if found else []), rewrapped(table["text"])]
    return "\n".join(lines).rstrip()


def format_groups(table: Mapping[str, Any]) -> list[str]:
    """Return a table with a row for each group of rows, in Markdown."""
    titles = f"Published{_unit(table)}", "Ours", "Ours / published", "Median error", "Tau", "First choice"
    lines = [f"| Group | Rows | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for name, group in groups_of(compared_rows(table["rows"]), table["page_groups"]).items():
        published, ours = ([pair[which] for pair in group] for which in range(2))
        ratios = [ours / rate for rate, ours in group]
        error = statistics.median(abs(ratio - 1) for ratio in ratios)
        order = ["-", "-"]
        if len(group) > 1:
            order = [f"{kendall(list(itertools.combinations(group, 2))):.2f}", f"{loss_of_first(group):.1%}"]
        found = _range(published), _range(ours), f"{statistics.median(ratios):.2f}", f"{error:.1%}", *order
        lines.append(f"| {name} | {len(group)} | {' | '.join(found)} |")
    return lines


def rewrapped(text: str) -> str:
    """Return paragraphs with lines of one width."""
    return "\n\n".join(_wrapped(paragraph) for paragraph in text.split("\n\n")) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _cells(row: Mapping[str, Any]) -> list[str]:
    ours, published = row["ours"], row["published"]
    found = f" ({row['found']})" if "found" in row else ""
    ratio = f"{ours / published:.2f}" if _is_compared(row) else "-"
    return [_number(published), _number(ours) + found, ratio]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _range(values: Sequence[float]) -> str:
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _is_compared(row: Mapping[str, Any]) -> bool:
    return None not in (row["ours"], row["published"])


def _unit(table: Mapping[str, Any]) -> str:
    return f" ({table['unit']})" if table["unit"] else ""


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines with the errors of the rows, of both halves, and of the order within groups of rows.

    Rows that others are relative to do not count.
    """
    compared = compared_rows(rows)
    halves = {"All": compared}
    if len(compared) >= FEWEST_HELD_OUT:
        halves |= {"Held out": [row for row in compared if is_held_out(row)]}
        halves |= {"Others": [row for row in compared if not is_held_out(row)]}
    lines = []
    for name, part in halves.items():
        ratios, errors = [row["ours"] / row["published"] for row in part], errors_of(part)
        if errors:
            ninth = errors[math.ceil(0.9 * len(errors)) - 1]
            within = sum(error <= 0.15 for error in errors)
            rows_found = f"{len(errors)} row{'s' * (len(errors) > 1)}"
            lines.append(
                f"- {name}, {rows_found}: median error {statistics.median(errors):.1%}, 90th percentile "
                f"{ninth:.1%},\n  median ratio {statistics.median(ratios):.2f}, {within} within 15%."
            )
    return [*lines, *_order(halves, "Order", "group"), *_order(halves, "Order, one tensor size", "same_tensor")]


def compared_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that have both values, without those that others are relative to."""
    return [row for row in rows if _is_compared(row) and row.get("to") != row["name"]]


def errors_of(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the relative errors of rows, the smallest first."""
    return sorted(abs(row["ours"] / row["published"] - 1) for row in rows)


def is_held_out(row: Mapping[str, Any]) -> bool:
    """Return whether a row is in the half that is reported apart."""
    return hashlib.sha256(row["name"].encode()).digest()[-1] % 2 == 1


def _order(halves: Mapping[str, Sequence[Mapping[str, Any]]], title: str, key: str) -> list[str]:
    """Return lines with Kendall's tau, and how far first choices are from the best, of groups of rows by a key."""
    lines = []
    for name, part in halves.items():
        groups = groups_of(part, key)
        pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
        if not pairs:
            continue
        several = [group for group in groups.values() if len(group) > 1]
        losses = [loss_of_first(group) for group in several]
        good = sum(loss <= 0.05 for loss in losses)
        lines.append(
            f"- {title}, {name.lower()}: Kendall's tau {kendall(pairs):.2f} over {len(pairs)} pairs "
            f"within groups;\n  in {good} of {len(several)} groups, "
            f"the first choice is within 5% of the best (worst {max(losses):.1%})."
        )
    return lines


def groups_of(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[tuple[float, float]]]:
    """Return the published values and ours by the value of a key of the rows, without the rows that do not have it."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if key in row:
            groups.setdefault(row[key], []).append((row["published"], row["ours"]))
    return groups


def loss_of_first(group: Sequence[tuple[float, float]]) -> float:
    """Return the fraction by which the published value of our first choice is below the best published value."""
    return 1 - max(group, key=lambda pair: pair[1])[0] / max(group)[0]


def kendall(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float:
    """Return Kendall's tau-a of pairs of rows, each row with a published value and ours: concordant - discordant."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(signs)


if __name__ == "__main__":
    sys.exit(exit_code(main))
