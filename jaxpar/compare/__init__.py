"""Comparisons of strategies, pipeline schedules and update policies by runs of `jaxpar train`."""
