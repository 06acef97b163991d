"""A second validator of tables and counter of peaks, which share no code with the package."""

import itertools

import numpy as np

from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, BW, B, F, Table, U, W


def is_valid(table: Table) -> bool:
    """Check the rules of tables one at a time over the whole table. Versions are not checked."""
    p, last, m = table.num_devices, table.num_stages - 1, table.num_microbatches
    rows = [row for row in table.actions.tolist() if row[2] != U]
    where = {(d, c): s for _, d, _, _, c, s, _, _ in rows}
    at = {(kind, k, s): clock for clock, _, kind, k, _, s, _, _ in rows}
    on = {(k, s): d for _, d, _, k, _, s, _, _ in rows}
    firsts = np.cumsum([0, *table.replicas]).tolist()
    if not rows or any(where[d, c] != s for _, d, _, _, c, s, _, _ in rows) or len(at) < len(rows):
        return False
    if table.replicas:
        if any(d != firsts[s] + k % table.replicas[s] for (k, s), d in on.items()):
            return False
    elif len(set(where.values())) != len(where):
        return False
    is_training = any(kind != F for kind, _, _ in at)
    backward = {(k, s): at.get((B, k, s), at.get((BW, k, s), np.inf)) for k in range(m) for s in range(last + 1)}
    for k, s in itertools.product(range(m), range(last + 1)):
        kinds = [kind for kind in (F, B, W, BW) if (kind, k, s) in at]
        if kinds not in (([F, B, W], [F, BW]) if is_training else ([F],)):
            return False
        if s and at[F, k, s] <= at.get((F, k, s - 1), np.inf):
            return False
        if not is_training:
            continue
        if s < last and backward[k, s] <= max(backward[k, s + 1], at[F, k, s]):
            return False
        if s == last and backward[k, s] < at[F, k, s]:
            return False
        if at.get((W, k, s), np.inf) < backward[k, s]:
            return False
    transfers = [
        (clock, d, (on[k, to] - d) % p)
        for clock, d, kind, k, _, s, _, _ in rows
        if kind != W and 0 <= (to := s + (1 if kind == F else -1)) <= last and on[k, to] != d
    ]
    busy = [(clock, d, ACTION_KINDS[kind].phase) for clock, d, kind, *_ in rows]
    if len(set(transfers)) < len(transfers) or len(set(busy)) < len(busy):
        return False
    if not is_training:
        return True
    slot = {(kind, k, s): x for _, _, kind, k, _, s, _, x in rows}
    uses: list[tuple[int, int, float, float]] = []  # stash and device, slot, start, end in fractional clocks
    for kind, k, s in at:
        if kind == F:
            end = B if (B, k, s) in at else BW
            if slot[F, k, s] != slot[end, k, s]:
                return False
            uses.append((on[k, s], slot[F, k, s], at[F, k, s], backward[k, s] + 0.5))
        if kind == W:
            uses.append((on[k, s] + p, slot[W, k, s], backward[k, s] + 0.5, at[W, k, s] + 0.75))
    return not any(a[:2] == b[:2] and b[2] < a[3] for a, b in itertools.pairwise(sorted(uses)))


def most(table: Table, starts: dict[int, float], ends: dict[int, float]) -> list[float]:
    """Return, by device, the largest sum at any action: `starts` add to it, and `ends` take from it, by kind."""
    return [
        max(
            itertools.accumulate(starts.get(kind, 0) - ends.get(kind, 0) for kind in kinds.tolist()),
            default=0,
        )
        for kinds in (table.actions["kind"][table.actions["device"] == d] for d in range(table.num_devices))
    ]
