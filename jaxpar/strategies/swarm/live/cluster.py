"""The peers of a live swarm on a Ray cluster (jaxpar/strategies/ray_cluster.py): room for them, and their handles.

Peers of a run with a namespace are detached: they stay in the cluster if the trainer ends, and a later trainer of the
same namespace finds them by their names. Other peers end with their trainer.
"""

import contextlib
import secrets
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar.errors import UserError
from jaxpar.strategies.swarm.live.peer import StagePeer

PEER_NAME = "peer"


def rooms(ray: Any, s: ConfigDict) -> list[tuple[str, int]]:
    """Return the machines that are alive, by Ray's identifier, and for how many peers each has resources, used or free.

    s: config.swarm, with the resources of a peer.
    """
    needs = {name: needed for name, needed in (("CPU", s.peer_cpus), ("GPU", s.peer_gpus)) if needed}
    nodes = [(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return [(node, int(min(has.get(name, 0.0) / need for name, need in needs.items()))) for node, has in nodes]


def check_room(ray: Any, s: ConfigDict) -> None:
    """Raise UserError if the cluster has room for fewer peers than stages, or no GPU for peers that need one."""
    if s.peer_gpus and not any(node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"]):
        raise UserError(
            f"config.swarm.peer_gpus is {s.peer_gpus:g}; it must be 0, because no machine of the Ray cluster has a GPU"
        )
    number = sum(room for _, room in rooms(ray, s))
    if number < s.stages:
        raise UserError(
            f"config.swarm.stages is {s.stages}; it must be at most {number}, the number of peers for which the Ray "
            f"cluster has room (config.swarm.peer_cpus={s.peer_cpus:g}, config.swarm.peer_gpus={s.peer_gpus:g})"
        )


def start_peer(ray: Any, node: str, settings: ConfigDict) -> Any:
    """Start a peer on a machine, and return its handle, without waiting for it. settings: config.swarm."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cpus, gpus = settings.peer_cpus, settings.peer_gpus
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    place = {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    if settings.namespace:
        name = f"{PEER_NAME}-{secrets.token_hex(4)}"
        place |= {"name": name, "namespace": settings.namespace, "lifetime": "detached"}
    return ray.remote(StagePeer).options(max_restarts=0, **place).remote(node, cpus, gpus, cache or "")


def named_peers(ray: Any, namespace: str) -> list[Any]:
    """Return the handles of the peers that an earlier trainer of this namespace has left."""
    peers = []
    for named in ray.util.list_named_actors(all_namespaces=True) if namespace else ():
        if named["namespace"] == namespace and named["name"].startswith(PEER_NAME):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                peers.append(ray.get_actor(named["name"], namespace=namespace))
    return peers
