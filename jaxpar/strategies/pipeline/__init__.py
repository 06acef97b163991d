"""Pipeline parallelism: a schedule is a NumPy table built ahead of time, and one engine runs every table."""
