"""Parts that all strategies share: the plan, the mesh, the state, the optimizer, the arithmetic of a step."""
