"""The page of a certificate: the verdict, what was compared, the errors with their tolerances, and where it ran."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.errors import format_count
from jaxpar.inspect.certificate import QUANTITIES
from jaxpar.inspect.certificate_report import cell, describe_verdict, format_delays
from jaxpar.use.pages.html import Cell, Row, document, folded, number_cell, paragraph, section, table

SHADE_AT_TOLERANCE = 0.5  # opacity of a cell whose error is as large as its tolerance, on which text is legible
MEANINGS = {
    "start": "parameters before the first step",
    "gradient": "the gradient that the optimizer receives, of each step from the same state",
    "update": "the output of the optimizer and the change of the parameters, for the same gradient",
    "moments": "the state of the optimizer, for the same gradient",
    "resume": "the state after the first step, saved and resumed; it must be equal",
    "drift": "parameters after two independent runs; it has no tolerance, because rounding errors grow",
}
DERIVATION = (
    "No tolerance was set by hand. Two orders of the same operations round differently, and one device computed by how "
    "much, for each step: {samples} times, all parameters, the input of every layer and the gradient that comes back "
    "to it were changed by one unit in the last place at random, and the examples of the batch were permuted. The "
    "update was computed again from changed gradients, parameters and moments.",
    "The square of a relative error is a mean over independent components, whose number follows from the spread of "
    "the samples. So a further error follows an F distribution, here with twice the variance of the samples, because a "
    "strategy can round twice as often as one device. Its tolerance is the bound that it exceeds with a probability of "
    "{false_alarm:g} / {number}, so that rounding alone makes the whole certificate fail with a probability of "
    "{false_alarm:g}.",
)


def certificate_page(certified: Mapping[str, Any]) -> str:
    """Return the page of a certificate. certified: its JSON object, as `jaxpar.certify` returns it."""
    layers = certified["layers"]
    present = [quantity for quantity in QUANTITIES if any(quantity in of for of in layers.values())]
    metrics: list[Row] = [[name, error_cell(error)] for name, error in certified["metrics"].items()]
    of_layers: list[Row] = [
        [name, *(error_cell(errors.get(quantity)) for quantity in present)] for name, errors in layers.items()
    ]
    note = paragraph(
        "Relative error / tolerance, of the step whose error is largest relative to its tolerance. `bitwise`: no "
        "difference in any step. The darker a cell, the closer the error is to its tolerance."
    )
    meanings: list[Row] = [[quantity, MEANINGS[quantity]] for quantity in present]
    return document(
        f"Certificate: {certified['model']}, {certified['strategy']}",
        [
            section("Verdict", *_verdict(certified)),
            section("What was compared", table(_compared(certified))),
            section("Layers", note, table(of_layers, ["layer", *present]), table(meanings)),
            section("Metrics", table(metrics, ["metric", "error / tolerance"])),
            section("Tolerances", *_derivation(certified["tolerance"])),
            section("Environment", table(_environment(certified))),
            section("Config", *_config(certified["config"])),
        ],
    )


def error_cell(error: Mapping[str, Any] | None) -> Cell:
    """Return the cell of an error, marked if it is outside its tolerance."""
    text = cell(dict(error) if error else None)
    if error is None:
        return Cell(text)
    relative, tolerance = error["relative"], error["tolerance"]
    if tolerance is None:
        return Cell(text, relative)
    if relative is None or relative > tolerance:
        return Cell(f"outside: {text}", relative, shade=SHADE_AT_TOLERANCE)
    return Cell(text, relative, shade=SHADE_AT_TOLERANCE * relative / tolerance if tolerance else 0.0)


def _verdict(certified: Mapping[str, Any]) -> list[str]:
    if certified["differs"]:
        return [paragraph(f"No tolerance applies: {certified['differs']}.")]
    of, outside = certified["tolerance"], certified["outside"]
    verdict = describe_verdict(outside, of["number"], of["false_alarm"])
    rows = [one.partition(": ")[::2] for one in outside]
    elements = [paragraph(f"{verdict[:1].upper()}{verdict[1:]}.")]
    if cause := certified["cause"]:
        found = [
            ["where", cause["where"]],
            ["cause", cause["cause"]],
            *(["evidence", one] for one in cause["evidence"]),
        ]
        elements += [table(found), table(rows, ["outside", "error"])]
    return elements


def _compared(certified: Mapping[str, Any]) -> list[Row]:
    sums, steps, is_exact = certified["sums"], certified["batches"], certified["model"].endswith(", float32")
    in_float32 = "" if is_exact else "; its losses and gradients are those of the model in float32"
    return [
        ["strategy", certified["strategy"]],
        ["model", certified["model"]],
        ["steps", f"{len(steps)}, on batches {', '.join(map(str, steps))}"],
        ["batch", f"{sums['batch_size']} examples over {sums['strategy']}"],
        ["reference", sums["reference"] + in_float32],
        *(["delays", format_delays(stage)] for stage in certified["delays"]),
    ]


def _derivation(tolerance: Mapping[str, Any] | None) -> list[str]:
    """Return how the tolerances were derived, and the errors that they find; nothing if there are none."""
    if tolerance is None:
        return []
    rows: list[Row] = [[layer, number_cell(value)] for layer, value in tolerance["smallest_scale_errors"].items()]
    finds = "The gradient of one layer that is larger by a factor of 1 + this error is found:"
    texts = [paragraph(text.format(**tolerance)) for text in DERIVATION]
    return [*texts, paragraph(finds), table(rows, ["layer", "scale error"])]


def _environment(certified: Mapping[str, Any]) -> list[Row]:
    on, versions = certified["devices"], certified["versions"]
    return [
        ["date", certified["date"].replace("T", " ").replace("+00:00", " UTC")],
        ["devices", f"{on['number']} x {', '.join(on['kinds'])} ({on['machine']})"],
        *([name, str(value)] for name, value in versions.items()),
        *([name, str(value)] for name, value in {**certified["seeds"], **certified["flags"]}.items()),
    ]


def _config(changed: Mapping[str, Any]) -> Sequence[str]:
    rows: list[Row] = [[key, repr(value)] for key, value in changed.items()]
    title = f"{format_count(len(rows), 'key')} with another value than in configs/default.py"
    return [folded(title, table(rows, ["key", "value"]))]
