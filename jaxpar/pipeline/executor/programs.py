"""What the F, B and W actions of each stage compute: the stage's layers, traced and cut into actions."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.models.model import REMAT_POLICIES, Batch
from jaxpar.pipeline.executor.split_backward import Cut, Origin, cut, flatten
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.tasks import Sums, mean_loss

REMATS = ("full", "none", "dots")


class StageInputs(NamedTuple):
    """What a stage's actions are given besides what they save for each other; all abstract while tracing.

    Attributes:
      params: of the chunk's layers, and what is tied to them.
      rows: the microbatch.
      key: of the step's dropout; None when evaluating.
      shift: how far the layers are behind those of the program, for their dropout.
      weight: of the global batch, by which losses are divided.
      x: for F: the stage's input; None at stage 0, whose input is in the rows.
      dy: for B: the gradient of the stage's output; None at the last stage, whose output is the loss.
    """

    params: Any
    rows: Batch
    key: Any
    shift: Any
    weight: Any
    x: Any = None
    dy: Any = None


class StageProgram(NamedTuple):
    """The actions of one chunk of one kind of device.

    F's output is the stage's output, or the leaves of a last stage's Sums. B's is the gradient of the stage's input;
    stage 0 has none. The gradients of the parameters are W's, or come last in B's where it is fused.
    """

    stage: int
    cut: Cut
    output: jax.ShapeDtypeStruct | None  # what goes to the next stage


def trace(stages: Stages, device: int, chunk: int, given: StageInputs, *, num_ranks: int, remat: str) -> StageProgram:
    """The program of a chunk.

    Args:
      given: abstract; dy is not looked at.
      num_ranks: 1: F alone; 2: F and BW; 3: F, B and W.
      remat: full, none, dots: what B finds saved.
    """
    stage = int(stages.placement[device, chunk])
    computation = _Stage(stages, stages.span(device, chunk), stage == 0, stage == stages.num_stages - 1)
    output = None
    if not computation.is_last:
        output = jax.eval_shape(lambda given: computation.forward(given, given.params, given.x, None)[0], given)
    given = given._replace(dy=output)
    actions = partial(computation.actions, num_ranks=num_ranks, remat=remat)
    num_outputs = [len(outputs) for outputs in jax.eval_shape(actions, given)]
    closed = jax.make_jaxpr(lambda given: jax.tree.leaves(actions(given)))(given)
    return StageProgram(stage, cut(flatten(closed, remat=num_ranks == 3), num_outputs, sources(given)), output)


def sources(given: StageInputs) -> list[Origin]:
    """Where each leaf comes from. Random numbers are slow to draw again, and stage 0 is computed from the inputs."""

    def of(part: Any, source: Origin) -> Any:
        return jax.tree.map(lambda _: source, part)

    rows = {name: of(row, "kept" if name == "inputs" else "free") for name, row in given.rows.items()}
    spread = StageInputs(
        of(given.params, "free"),
        rows,
        of(given.key, "kept"),
        of(given.shift, "free"),
        of(given.weight, "free"),
        of(given.x, 0),
        of(given.dy, 1),
    )
    return jax.tree.leaves(spread)


class _Stage(NamedTuple):
    """The computation of a stage."""

    stages: Stages
    span: tuple[int, int]
    is_first: bool
    is_last: bool

    def layers(self, given: StageInputs, params: Any, x: jax.Array, start: int, stop: int) -> jax.Array:
        """Without a scan: it would stack the weights for every microbatch, and make dX and dW at once."""
        keys_B = None if given.key is None else jax.vmap(partial(jax.random.fold_in, given.key))(given.rows["index"])
        model = self.stages.model
        return model.apply_layers(params, x, given.rows, keys_B, start, stop, shift=given.shift, scan=False)

    def forward(self, given: StageInputs, params: Any, x: Any, bump: Any) -> tuple[jax.Array, Sums | None]:
        """What is differentiated, the output or the loss; and the sums of a last stage.

        Args:
          bump: zeros to be added to the output of the first layer, or None.
        """
        start, stop = self.span
        x = given.rows["inputs"] if self.is_first else x
        if bump is not None:
            x, start = self.layers(given, params, x, start, start + 1) + bump, start + 1
        y = self.layers(given, params, x, start, stop)
        if not self.is_last:
            return y, None
        sums = self.stages.task.sums(y, given.rows)
        return mean_loss(sums.loss, given.weight), sums

    def actions(self, given: StageInputs, *, num_ranks: int, remat: str) -> list[list[jax.Array]]:
        """The outputs of each action."""
        forward = partial(self.forward, given)
        if num_ranks == 1:
            y, sums = forward(given.params, given.x, None)
            return [jax.tree.leaves(y if sums is None else sums)]
        bump, (start, stop) = None, self.span
        if num_ranks == 3 and self.is_first and stop - start > 1:
            # Nobody waits for dX of stage 0, so all would be W. Its B is what leads to dX of its second layer.
            first = partial(self.layers, given, given.params, given.rows["inputs"], start, start + 1)
            bump = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(first))
        function = forward if remat in ("none", "full") else jax.checkpoint(forward, policy=REMAT_POLICIES[remat])
        y, pullback, sums = jax.vjp(function, given.params, given.x, bump, has_aux=True)
        if remat == "full":  # F by itself: so all that jax.vjp computes is B's, again
            y, sums = forward(given.params, given.x, None)
        dparams, *inner = pullback(jnp.ones(y.shape, y.dtype) if self.is_last else given.dy)
        outputs = jax.tree.leaves(y if sums is None else sums)
        leaves, inner = jax.tree.leaves(dparams), [gradient for gradient in inner if gradient is not None]
        return [outputs, inner, leaves] if num_ranks == 3 else [outputs, [*inner, *leaves]]
