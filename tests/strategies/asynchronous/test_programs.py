"""The server's program: a nonfinite loss or gradient keeps its update from being applied, and is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.programs import Arrival, Programs
from tests.strategies.pipelines import Task, make_config, make_problem

MLP = Task("mlp", "classification", layers=1)
SIZE = 3  # gradients per update


@pytest.mark.parametrize("wrong", [None, *((number, part) for number in range(SIZE) for part in ("loss", "gradient"))])
def test_an_update_is_applied_where_all_of_its_gradients_are_finite(wrong: tuple[int, str] | None) -> None:
    problem = make_problem(make_config(MLP), MLP)
    nothing = optax.with_extra_args_support(optax.identity())
    programs = Programs(problem, Mitigations(nothing, nothing, needs_read=False), SIZE)
    params = problem.model.init(jax.random.key(0))
    server = programs.server(params, problem.optimizer.init(params), None, is_grouped=True)
    before = jax.tree.map(np.array, (params, server.optimizer))
    for number in range(SIZE):
        loss, value = (
            (jnp.inf if wrong == (number, "loss") else 1.0),
            (jnp.nan if wrong == (number, "gradient") else 0.1),
        )
        grads = jax.tree.map(lambda x, value=value: jnp.full(x.shape, value, x.dtype), params)
        sums = problem.task.zeros()._replace(loss=jnp.float32(loss))
        at = Arrival(np.float32(0), np.float32(0), np.float32(SIZE), np.int32(5))
        params, server = programs.arrive(number == 0, number == SIZE - 1, params, server, (grads, sums, None, None), at)
        if wrong is None or number >= wrong[0]:  # on arrival, because the step may end before the update is complete
            assert bool(server.totals.finite) == (wrong is None)
    same = [
        np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, ((params, server.optimizer), before)), strict=True)
    ]
    assert all(same) == (wrong is not None)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves((params, server)))  # the next update starts at zero
    assert np.isfinite(programs.metrics(server.totals, None).grad_norm) == (wrong is None)
