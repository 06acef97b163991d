"""Pipelines over peers of different speeds that join, leave and fail: decisions, and runs in virtual time."""
