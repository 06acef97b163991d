"""Statements about strategies from outside: audits, certificates."""
