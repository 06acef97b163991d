"""The outer step between whole runs: DiLoCo and local SGD, live, with any strategy inside.

Each worker is a run of its own, on its own machine and with its own share of the data (worker.py). Every few steps, it
sends the difference between the last common parameters, the anchor, and its own ones to a server (server.py), which
averages the differences of all workers and moves the anchor. The server is an actor on Ray (live.py). It writes a table
of all contributions (table.py), from which the run can be replayed in one process (recorded.py).
"""
