"""What Ray, torch and vLLM read from the environment when the run's processes start. Called by prepare.py.

Ray runs whatever code it is sent, and VERL's rollout server loads what it is told to load. A run on one machine
therefore listens on the loopback interface only, unless the user has chosen an address or a cluster. A setting that the
user has made by hand stays as it is.
"""

import logging
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches import loopback_stores, ours, ray_start

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    # Host RAM is filled on purpose, up to the planned reserve. With more than 95 % in use Ray would kill a process.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray would start an idle Python process per core, 80 MB each. A run of VERL cannot use them: its workers have an
    # environment of their own.
    "RAY_prestart_worker_first_driver": "0",
    # On a machine that is busy with something else Ray's processes take longer to start than Ray waits for by default.
    # Ray's own limits stand behind these.
    ray_start.LIMIT: "90",  # 30, until the node is there; a node that has ended is waited for as long
    "RAY_gcs_server_port_wait_time_s": "90",  # 30, until the cluster's directory is there
    "RAY_gcs_rpc_server_connect_timeout_s": "60",  # 5, until a process has connected to it
    "RAY_py_gcs_connect_timeout_s": "90",  # 30, the same in Python
    "RAY_gcs_server_request_timeout_seconds": "300",  # 60
    "RAY_raylet_client_num_connect_attempts": "60",  # 10, a second each, until a process has connected to the node
    "RAY_agent_register_timeout_ms": "300000",  # 30 s, until the node has connected to its agent
    "RAY_worker_register_timeout_seconds": "600",  # 60, until a new process has reported to the node
    "RAY_health_check_timeout_ms": "60000",  # 10 s, until a node that does not answer counts as failing
}
_LOOPBACK = {
    # Ray's own switch for clusters of one node: the node's address is then 127.0.0.1, and its servers listen there.
    ray_start.SWITCH: "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",  # NCCL listens for the other ranks of a group also if there are none
    "VLLM_HOST_IP": "127.0.0.1",
    loopback_stores.VARIABLE: "1",
}


def fill_in(config: DictConfig) -> None:
    """Set the variables that the processes of the run inherit, in this process's environment."""
    ours.note_driver()
    alone = stays_on_this_machine(config)
    for name, value in (_ENVIRONMENT | (_LOOPBACK if alone else {})).items():
        os.environ.setdefault(name, value)
    rollout = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
    if alone and rollout == "vllm" and loopback_stores.wanted() and not loopback_stores.reaches_vllm():
        log.warning(
            "vLLM's engine will listen on every network interface: it is not told otherwise, because VLLM_PLUGINS leaves "
            "%s out, or because megatrain-rl was installed before it had this plug-in; change VLLM_PLUGINS or install again",
            loopback_stores.PLUGIN,
        )


def stays_on_this_machine(config: DictConfig) -> bool:
    """Whether the run starts a Ray of its own, on this machine alone, and the user has given it no other address.

    `ray.init` connects to a cluster that is named in the config or in RAY_ADDRESS, and without a name to one that
    `ray start` has left running here.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    given: Any = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    if ray.is_initialized() or given.get("_node_ip_address") not in (None, "127.0.0.1", "localhost"):
        return False
    try:
        return canonicalize_bootstrap_address(given.get("address"), given.get("_temp_dir")) is None
    except Exception:  # a cluster that is not there, or a text that is no address: ray.init says so
        return False
