"""The page of published results: it is current, its cheap tables are repeated, and its statistics are right."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from jaxpar.choose.costs.profile import read_profile
from jaxpar.errors import UserError
from scripts.bench import published
from scripts.bench.papers import amoebanet, gpipe, megatron, pipedream, swarm
from scripts.bench.papers.planned import predicted_rate

MODULES = {"gpipe": gpipe, "pipedream": pipedream, "swarm": swarm}
TABLES = [
    pytest.param(table, id=table["title"])
    for name in published.PAPERS
    for table in published.read(name)["tables"]
    if table.get("module") in MODULES and table["kind"] != "rebalancing"
]


def test_the_pages_are_current() -> None:
    pages = published.pages()
    assert {name: (published.PAGES / name).read_text() for name in pages} == pages


def test_every_file_is_on_the_page() -> None:
    assert {path.stem for path in published.FOLDER.glob("*.json")} == set(published.PAPERS)


@pytest.mark.parametrize("table", TABLES)
def test_ours_is_repeated(table: dict[str, Any]) -> None:
    for row, value in zip(table["rows"], MODULES[table["module"]].values(table), strict=True):
        number, *found = value if isinstance(value, tuple) else (value,)
        if number is None:
            assert row["ours"] is None, row["name"]
            continue
        assert row["ours"] == pytest.approx(number, rel=1e-3), row["name"]
        assert found == [row[key] for key in ("found",) if key in row]


def test_parameters_of_amoebanet_and_the_transformer_are_those_of_the_paper() -> None:
    (table,) = (one for one in published.read("gpipe")["tables"] if one["kind"] == "parameters")
    for row, millions in zip(table["rows"], gpipe.values(table), strict=True):
        assert millions == pytest.approx(row["published"], rel=0.025)


@pytest.mark.parametrize(
    "name",
    [
        "MPT: 1b, a100-80gb:8, 4 x 14",
        "02-26, 84 x 13312, 64 heads: dp 8, tp 4, pp 12, 128 x 2",
        "Bagua decentralized, 1 Gb/s",
        "nanotron: 3.6b, tp 8, 1 x 18",
    ],
)
def test_a_planned_rate_is_repeated(name: str) -> None:
    tables = (table for paper in published.PAPERS for table in published.read(paper)["tables"])
    (found,) = ((table, row) for table in tables for row in table["rows"] if row["name"] == name)
    table, row = found
    rate = megatron.priced_rate if table["module"] == "megatron" else predicted_rate
    predicted = rate(row, table["models"][row["model"]])
    if "to" in row:
        [other] = [one for one in table["rows"] if one["name"] == row["to"]]
        predicted /= rate(other, table["models"][row["model"]])
    assert predicted == pytest.approx(row["ours"], rel=0.02)


def test_a_device_of_gpipe_recomputes_while_it_waits() -> None:
    """Two stages of 0.5 s: by hand, with the recomputation of the first stage before its gradient arrives."""
    assert gpipe.seconds([0.5, 0.5], 1, repeats_last=True) == pytest.approx(3.5)
    assert gpipe.seconds([0.5, 0.5], 2, repeats_last=True) == pytest.approx(2.75)
    assert gpipe.seconds([0.5, 0.5], 2, repeats_last=False) == pytest.approx(2.5)


def test_activations_of_amoebanet() -> None:
    """Stages read 128 images, and recompute one: the values of the convolutions of the stem, counted by hand."""
    stem, first, *_ = amoebanet.amoebanet(18, 208)
    side, channels = 224, 208 // 4
    assert stem.inputs == 4 * 3 * side**2
    assert stem.saved == 4 * (3 * side**2 + channels * (side // 2) ** 2)
    assert first.inputs == 4 * 2 * channels * (side // 2) ** 2


MEGATRON = {"features": 27 * 1024, "heads": 256, "layers": 4, "tokens": 2048, "words": 51200, "transfers": 2}
A100S = {"cluster": "a100-80gb:8", "size": 2, "microbatches": 4, "stages": 1, "cuts": 4, "cuts_ends": 0}


def test_products_of_megatron_are_those_of_its_formula() -> None:
    """A block computes 96 B T D^2 (1 + T / 6D) FLOPs with recomputation (Narayanan et al., 2021, section 3).

    Tiles of these sizes fill the processors of an A100, and memory is free.
    """
    run = megatron.MegatronRun({**A100S, "tensor": 1}, MEGATRON)
    run.cluster = replace(run.cluster, memory_bandwidth=1e30)
    tokens, features = 2 * 2048, MEGATRON["features"]
    flops = 96 * tokens * features**2 * (1 + 2048 / (6 * features))
    assert sum(run.block()) * 0.8 * run.cluster.peak_flops["bfloat16"] == pytest.approx(flops)


def test_a_tensor_axis_repeats_the_passes_over_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device moves 45 times the bytes of all positions in a step of a block, and 1 / t of the rest."""
    seconds = []
    for size in (1, 8):
        run = megatron.MegatronRun({**A100S, "tensor": size}, MEGATRON)
        run.cluster = replace(run.cluster, peak_flops={"bfloat16": 1e30}, memory_bandwidth=1e9 / 0.85)
        monkeypatch.setattr(run, "products", lambda _: megatron.PhaseTimes(0.0, 0.0))
        seconds.append(sum(run.block()))
    repeated = (8 * seconds[1] - seconds[0]) / 7
    assert repeated * 1e9 == pytest.approx(45 * 2 * 2 * 2048 * MEGATRON["features"])


def test_products_take_whole_waves() -> None:
    """109 tiles on 108 processors take two waves."""
    assert megatron.wave_factor(128 * 108, 256) == pytest.approx(1.0)
    assert megatron.wave_factor(128 * 109, 256) == pytest.approx(216 / 109)


def test_statistics() -> None:
    """The order of one group is compared with SciPy's, whose tau-b is tau-a without ties."""
    published_rates, ours = [4.0, 1.0, 3.0, 2.0, 10.0], [3.9, 1.2, 2.0, 2.5, 20.0]
    rows = [
        {"name": str(number), "published": a, "ours": b, "group": "one"}
        for number, (a, b) in enumerate(zip(published_rates, ours, strict=True))
    ]
    errors, order = published.summary(rows)
    assert errors.startswith(
        "- All, 5 rows: median error 25.0%, 90th percentile 100.0%,\n  median ratio 1.20, 1 within"
    )
    tau = stats.kendalltau(published_rates, ours).statistic
    assert f"Kendall's tau {tau:.2f} over 10 pairs" in order
    assert "in 1 of 1 groups, the first choice is within 5% of the best (worst 0.0%)" in order
    wrong = published.summary([*rows[:4], rows[4] | {"ours": 0.1}])[1]
    assert "in 0 of 1 groups" in wrong
    assert "(worst 60.0%)" in wrong  # 4.0 is chosen, and 10.0 is best


def test_one_row_of_ten_is_above_the_90th_percentile() -> None:
    rows = [{"name": str(number), "published": 1.0, "ours": 1 + number / 10} for number in range(1, 11)]
    assert "90th percentile 90.0%" in published.summary(rows)[0]


def test_groups_of_rows() -> None:
    """A page has a line for each group, with SciPy's tau; the rows are printed."""
    pairs = {"one": ([4.0, 1.0, 3.0], [3.9, 2.0, 4.5]), "alone": ([2.0], [1.0])}
    rows = [
        {"name": f"{group} {number}", "published": a, "ours": b, "size": group}
        for group, values in pairs.items()
        for number, (a, b) in enumerate(zip(*values, strict=True))
    ]
    table = {"rows": rows, "page_groups": "size", "unit": "tokens/s", "title": "", "how": "", "command": "", "text": ""}
    tau = stats.kendalltau(*pairs["one"]).statistic
    lines = published.format_groups(table)
    titles = "Group | Rows | Published (tokens/s) | Ours | Ours / published | Median error | Tau | First choice"
    assert lines[0] == f"| {titles} |"
    assert lines[2:] == [
        f"| one | 3 | 1 to 4 | 2 to 4.5 | 1.50 | 50.0% | {tau:.2f} | 25.0% |",
        "| alone | 1 | 2 | 1 | 0.50 | 50.0% | - | - |",
    ]
    paper = {"title": "", "computed": "", "text": "", "tables": [table]}
    page, printed = published.format_paper(paper), published.format_paper(paper, with_all_rows=True)
    assert ("| one | 3 |" in page, "| one 2 |" in page) == (True, False)
    assert ("| one | 3 |" in printed, "| one 2 |" in printed) == (False, True)


def test_references_and_missing_rows_do_not_count() -> None:
    rows = [
        {"name": "a", "to": "a", "published": 1.0, "ours": 1.0},
        {"name": "b", "to": "a", "published": 1.0, "ours": 1.5},
        {"name": "c", "published": 1.0, "ours": None},
    ]
    assert published.summary(rows)[0].startswith("- All, 1 row: median error 50.0%")


def test_half_of_many_rows_are_held_out() -> None:
    rows = [{"name": f"row {number}", "published": 1.0, "ours": 1.1} for number in range(200)]
    held_out = [row for row in rows if published.is_held_out(row)]
    assert 80 < len(held_out) < 120
    lines = published.summary(rows)
    assert [line.split(",")[0] for line in lines] == ["- All", "- Held out", "- Others"]
    assert f"- Held out, {len(held_out)} rows" in lines[1]


def test_unknown_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["published.py", "--only=gpipe,bert"])
    with pytest.raises(UserError, match=r"^--only is gpipe,bert; it must not have bert"):
        published.main()


def test_stages_of_a_memory_table_are_those_of_brute_force() -> None:
    """No other cut into four stages has a faster slowest stage."""
    layers = read_profile(pipedream.PROFILES / "alexnet.json")
    times = [one.forward_s + one.backward_s for one in layers]
    sizes = [one.weight_bytes + one.stash_bytes for one in layers]
    found = min(
        (max(sum(times[a:b]) for a, b in itertools.pairwise([0, *cut, len(times)])), cut)
        for cut in itertools.combinations(range(1, len(times)), 3)
    )[1]
    expected = [(4 - s) * sum(sizes[a:b]) for s, (a, b) in enumerate(itertools.pairwise([0, *found, len(times)]))]
    assert pipedream.stage_bytes(layers, 4) == pytest.approx(expected)
