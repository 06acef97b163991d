"""Compiled programs against plans: the audit, the certificate, times, the largest batch, the report of a plan."""
