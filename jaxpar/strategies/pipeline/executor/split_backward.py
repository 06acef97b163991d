"""Cuts the forward and backward pass of a stage into the phases F, B and W, without computing a product twice.

The forward and backward pass are traced as one jaxpr. F computes the output of the stage, B the gradient of its input
(dX), and W the gradient of its weights (dW). An equation belongs to the first phase whose outputs depend on it, and
values that a later phase needs are saved. Weights and the batch are available in every phase. So they are never saved,
and neither are values that depend only on weights and on arrays of the batch other than `inputs`, such as a cast
weight or an attention mask: these are recomputed. An elementwise function of values that are saved anyway, such as an
activation function and its derivative, is recomputed too.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2, introduced B and W as separate phases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.core.groups import SentArrays
from jaxpar.strategies.pipeline.executor.collectives import sent_arrays

# Primitives whose equation can be replaced by the jaxpr that it calls, and the parameter that holds the jaxpr.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMAT_CALLS = {"remat2": "jaxpr", "checkpoint": "jaxpr"}

# Primitives that compute an element of the result from one element of each operand.
ELEMENTWISE = frozenset(
    (
        *("abs", "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "cos", "div", "eq", "erf"),
        *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log"),
        *("log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not", "optimization_barrier", "or"),
        *("pow", "reshape", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "squeeze", "sub", "tan"),
        *("tanh", "xor"),
    )
)

# The origin of an input of the jaxpr. "free" and "saved" inputs are available in every phase. Values that depend on
# "free" inputs alone are recomputed wherever they are needed. Values that depend on "saved" inputs are saved, except
# for PRNG keys. An int is the number of the only phase that receives the input.
Origin = Literal["free", "saved"] | int
Saved = Mapping[tuple[int, int], Any]  # (phase that computes them, last phase that uses them) -> list of values
Variables = dict[tuple[int, int], list[Any]]  # the same, for variables of a jaxpr


class Cut(NamedTuple):
    """A jaxpr cut into phases."""

    # one function per phase: (inputs of the jaxpr, values that earlier phases saved) -> (outputs, values that this
    # phase saves). Inputs that the phase does not use may be None.
    run: tuple[Callable[[Sequence[Any], Saved], tuple[list[Any], Saved]], ...]
    # shapes of the saved values, by (phase that computes them, last phase that uses them). Phase k may read all (i, j)
    # with i < k <= j.
    saved: dict[tuple[int, int], list[jax.ShapeDtypeStruct]]
    # by phase, the dtype of each input that it reads, by number: a narrower one if it casts the input first
    reads: tuple[dict[int, Any], ...]
    sent: tuple[list[SentArrays], ...]  # by phase, what its collectives send


def cut_phases(closed: core.ClosedJaxpr, num_outputs: Sequence[int], sources: Sequence[Origin]) -> Cut:
    """Cut a jaxpr without calls (see `flatten`) into phases, one for each group of consecutive outputs.

    num_outputs: number of outputs of each phase. sources: origin of each input.
    """
    jaxpr = closed.jaxpr
    ends = [sum(num_outputs[: i + 1]) for i in range(len(num_outputs))]
    outputs = [jaxpr.outvars[end - number : end] for end, number in zip(ends, num_outputs, strict=True)]
    is_cheap = _cheap(jaxpr, sources)
    # Which elementwise functions can be recomputed follows from what is saved anyway. Recomputing them then makes it
    # unnecessary to save some values, so the second assignment is the final one.
    _, saved = _assign(jaxpr, outputs, sources, is_cheap)
    equations, saved = _assign(jaxpr, outputs, sources, is_cheap | _elementwise(jaxpr, sources, is_cheap, saved))
    runs = tuple(_runner(closed, equations[phase], outputs[phase], saved, phase) for phase in range(len(outputs)))
    avals = {key: [var.aval for var in variables] for key, variables in saved.items()}
    kept = {key: [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of_key] for key, of_key in avals.items()}
    reads = [_reads(jaxpr, equations[phase], outputs[phase]) for phase in range(len(outputs))]
    return Cut(runs, kept, tuple(reads), tuple(list(sent_arrays(of_phase)) for of_phase in equations))


def _assign(
    jaxpr: Any, outputs: Sequence[Any], sources: Sequence[Origin], is_cheap: Mapping[int, bool]
) -> tuple[list[list[Any]], Variables]:
    """Return the equations that each phase runs, and the values to save by (phase that computes them, last use)."""
    maker = {var: source for var, source in zip(jaxpr.invars, sources, strict=True) if isinstance(source, int)}
    first_use: dict[Any, int] = {}  # first phase whose outputs depend on a variable, which therefore computes it
    for phase in reversed(range(len(outputs))):
        first_use |= dict.fromkeys(_variables(outputs[phase]), phase)
    for equation in reversed(jaxpr.eqns):
        uses = [first_use[var] for var in equation.outvars if var in first_use]
        if not uses:
            continue
        if not is_cheap[id(equation)]:
            maker |= dict.fromkeys(equation.outvars, min(uses))
        for var in _variables(equation.invars):
            first_use[var] = min(first_use.get(var, min(uses)), *uses)
    equations = [_needed(jaxpr, outputs[phase], maker, is_cheap, phase) for phase in range(len(outputs))]
    last_use: dict[Any, int] = {}
    for phase, own in enumerate(equations):
        for var in _variables([var for equation in own for var in equation.invars] + list(outputs[phase])):
            last_use[var] = phase
    saved: Variables = {}
    for var, made_by in maker.items():
        if last_use.get(var, made_by) > made_by:
            saved.setdefault((made_by, last_use[var]), []).append(var)
    return equations, saved


def _cheap(jaxpr: Any, sources: Sequence[Origin]) -> dict[int, bool]:
    """Return, by id of the equation, whether its results are recomputed where they are needed rather than saved."""
    origin: dict[Any, Origin] = dict(zip(jaxpr.invars, sources, strict=True)) | dict.fromkeys(jaxpr.constvars, "free")
    is_cheap = {}
    for equation in jaxpr.eqns:
        origins = {origin[var] for var in _variables(equation.invars)}
        are_keys = all(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key) for var in equation.outvars)
        is_cheap[id(equation)] = origins <= {"free"} or (origins <= {"free", "saved"} and are_keys)
        kind = "free" if origins <= {"free"} else "saved" if origins <= {"free", "saved"} else 0
        origin |= dict.fromkeys(equation.outvars, kind)
    return is_cheap


def _elementwise(
    jaxpr: Any, sources: Sequence[Origin], is_cheap: Mapping[int, bool], saved: Variables
) -> dict[int, bool]:
    """Return the equations, by id, whose results are elementwise functions of values that are saved for long enough."""
    last_use = {var: phases[1] for phases, variables in saved.items() for var in variables}
    until: dict[Any, float] = dict.fromkeys(jaxpr.constvars, math.inf)  # last phase in which a value is available
    for var, source in zip(jaxpr.invars, sources, strict=True):
        until[var] = last_use.get(var, source) if isinstance(source, int) else math.inf
    found = {}
    for equation in jaxpr.eqns:
        is_elementwise = equation.primitive.name in ELEMENTWISE or is_cheap[id(equation)]
        end = min((until[var] for var in _variables(equation.invars)), default=math.inf) if is_elementwise else -1
        if end >= max(last_use.get(var, 0) for var in equation.outvars):
            found[id(equation)] = True
            until |= dict.fromkeys(equation.outvars, end)
        else:
            until |= {var: last_use.get(var, -1) for var in equation.outvars}
    return found


def _needed(
    jaxpr: Any, outputs: Sequence[Any], maker: Mapping[Any, int], is_cheap: Mapping[int, bool], phase: int
) -> list[Any]:
    """Return the equations that a phase runs: those that belong to it, and the cheap ones that they depend on."""
    wanted, needed = set(_variables(outputs)), []
    # All equations of the phase are included, as later phases may need their results.
    for equation in reversed(jaxpr.eqns):
        is_of_phase = any(maker.get(var) == phase for var in equation.outvars)
        if is_of_phase or (is_cheap[id(equation)] and wanted.intersection(equation.outvars)):
            needed.append(equation)
            wanted.update(_variables(equation.invars))
    return needed[::-1]


def _runner(
    closed: core.ClosedJaxpr, equations: list[Any], outputs: list[Any], saved: Variables, phase: int
) -> Callable[[Sequence[Any], Saved], tuple[list[Any], Saved]]:
    jaxpr = closed.jaxpr
    reads = [key for key in saved if key[0] < phase <= key[1]]
    writes = [key for key in saved if key[0] == phase]
    received = [var for key in reads for var in saved[key]]
    made = [var for key in writes for var in saved[key]]
    used = set(_variables([var for equation in equations for var in equation.invars] + outputs + made))
    places = [index for index, var in enumerate(jaxpr.invars) if var in used.difference(received)]
    own = [jaxpr.invars[place] for place in places]
    part = jaxpr.replace(invars=[*own, *received], outvars=[*outputs, *made], eqns=equations)
    function = core.jaxpr_as_fun(core.ClosedJaxpr(part, closed.consts))

    def run(inputs: Sequence[Any], values: Saved) -> tuple[list[Any], Saved]:
        results = function(*[inputs[place] for place in places], *[value for key in reads for value in values[key]])
        rest = iter(results[len(outputs) :])
        return results[: len(outputs)], {key: [next(rest) for _ in saved[key]] for key in writes}

    return run


def _reads(jaxpr: Any, equations: Sequence[Any], outputs: Sequence[Any]) -> dict[int, Any]:
    """Return the dtype in which these equations read each input of the jaxpr, by number."""
    dtypes: dict[Any, set[Any]] = {var: {var.aval.dtype} for var in _variables(outputs)}
    for equation in equations:
        is_cast = equation.primitive.name == "convert_element_type"
        for var in _variables(equation.invars):
            dtypes.setdefault(var, set()).add(equation.outvars[0].aval.dtype if is_cast else var.aval.dtype)
    reads = {}
    for number, var in enumerate(jaxpr.invars):
        if var in dtypes:
            [first, *others] = dtypes[var]
            own = var.aval.dtype
            reads[number] = first if not others and first != own and first.itemsize < own.itemsize else own
    return reads


def flatten(closed: core.ClosedJaxpr, *, remat: bool, axes: Sequence[tuple[str, int]] = ()) -> core.ClosedJaxpr:
    """Return an equivalent jaxpr in which calls of jitted functions are inlined, with `remat` also `jax.checkpoint`.

    A call is one equation, so all of it would belong to one phase. axes: names and sizes of those of its collectives.
    """
    wrappers = CALLS | (REMAT_CALLS if remat else {})
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate_jaxpr(closed, args, wrappers), axis_env=axes)(*avals)


def evaluate_jaxpr(
    closed: core.ClosedJaxpr,
    args: Sequence[Any],
    wrappers: Mapping[str, str],
    changed: Callable[[str, list[Any]], list[Any]] = lambda _name, outs: outs,
) -> list[Any]:
    """Return the results of a jaxpr, equation by equation.

    wrappers: primitives whose jaxpr is evaluated in this way too, such as CALLS. changed: (name of a primitive, results
    of its equation) -> the results that later equations read.

    A barrier of several arrays, one equation, becomes a barrier of each, so that they can belong to different phases.
    """
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    used = set(_variables([var for equation in jaxpr.eqns for var in equation.invars] + jaxpr.outvars))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else values[var]

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in wrappers:
            inner = equation.params[wrappers[name]]
            inner = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
            outs = evaluate_jaxpr(inner, [read(var) for var in equation.invars], wrappers, changed)
            values |= dict(zip(equation.outvars, outs, strict=True))
        elif name == "optimization_barrier":
            outs = [jax.lax.optimization_barrier(read(var)) for var in equation.invars]
            values |= dict(zip(equation.outvars, outs, strict=True))
        else:
            invars = list(dict.fromkeys(_variables(equation.invars)))
            outvars = [var for var in equation.outvars if var in used]
            one = jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=[equation])
            outs = core.jaxpr_as_fun(core.ClosedJaxpr(one, ()))(*[values[var] for var in invars])
            values |= dict(zip(outvars, changed(name, outs), strict=True))
    return [read(var) for var in jaxpr.outvars]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]
