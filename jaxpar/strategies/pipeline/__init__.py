"""Pipeline parallelism: a schedule is a NumPy table built ahead of time, and each of two executors runs every table."""
