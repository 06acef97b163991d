"""What is said about strategies from outside: audits, certificates."""
