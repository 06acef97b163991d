"""Checks of strategies from the outside: the audit and the certificate."""
