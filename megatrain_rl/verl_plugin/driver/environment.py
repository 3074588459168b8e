"""What Ray, torch and vLLM read from the environment when the run's processes start. Called by prepare.py.

Ray runs whatever code it is sent, and VERL's rollout server loads what it is told to load. A run on one machine
therefore listens on the loopback interface only, unless the user has chosen an address or a cluster. A setting that the
user has made by hand stays as it is.
"""

import os
from typing import cast

from omegaconf import DictConfig, OmegaConf

from verl_patches import loopback_stores, ours, ray_start

_ENVIRONMENT = {
    # Host RAM is filled on purpose, up to the planned reserve. With more than 95 % in use Ray would kill a process.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray would start an idle Python process per core, 80 MB each. A run of VERL cannot use them: its workers have an
    # environment of their own.
    "RAY_prestart_worker_first_driver": "0",
    # On a machine that is busy with something else Ray's processes take longer to import than Ray waits for by default.
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_port_wait_time_s": "90",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_raylet_client_num_connect_attempts": "60",
    "RAY_health_check_timeout_ms": "60000",
}
_LOOPBACK = {
    # Ray's own switch for clusters of one node: the node's address is then 127.0.0.1, and its servers listen there.
    ray_start.SWITCH: "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    loopback_stores.VARIABLE: "1",
}


def fill_in(config: DictConfig) -> None:
    """Set the variables that the processes of the run inherit, in this process's environment."""
    ours.note_driver()
    variables = _ENVIRONMENT | (_LOOPBACK if stays_on_this_machine(config) else {})
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def stays_on_this_machine(config: DictConfig) -> bool:
    """Whether the run starts a Ray of its own, on this machine alone, and the user has given it no address."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    given = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    if ray.is_initialized() or given.get("_node_ip_address") is not None:
        return False
    address = given.get("address")
    if address not in (None, "auto"):
        return address == "local"
    try:  # a cluster that is named in the environment, or that `ray start` has begun on this machine
        return canonicalize_bootstrap_address(cast(str, address), given.get("_temp_dir")) is None
    except Exception:  # ray.init raises it again
        return False
