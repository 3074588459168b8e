"""Ray of a run of ours listens on the loopback interface, and says what to do when its node does not start in time.

Symptom: a run on one machine listens on every interface, and Ray runs any code that it is sent; on a busy machine a run
    ends with "The current node timed out during startup".
Cause: Ray reads its switch for clusters of one node (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER) when it is imported, and VERL's
    mains import it before any config is read. And it gives its node's agent 15 s, after which the node ends itself, and
    the driver waits for it to the end of LIMIT.
Upstream: ray 2.60, _private/ray_constants.py:658; _private/node.py:428 and raylet/node_manager.cc,
    WaitForDashboardAgentPorts. No issue known.
Remove when: `ray.init` has an argument for the address to listen on and one for the time to wait.
"""

import os
from types import ModuleType

from verl_patches.ours import driver_lives_here
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "ray"
VERSIONS = {"verl": TESTED_VERL}
SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Seconds that Ray waits for its node, in the environment.
LIMIT = "RAY_raylet_start_wait_time_s"
_TOO_LATE = "timed out during startup"


def apply(module: ModuleType) -> None:
    def init(init, *args, **kwargs):
        if not driver_lives_here():
            return init(*args, **kwargs)
        if os.environ.get(SWITCH) == "0":
            from ray._private import ray_constants

            if not isinstance(ray_constants.ENABLE_RAY_CLUSTER, bool):
                raise AttributeError("ray_constants.ENABLE_RAY_CLUSTER is no switch: this patch no longer fits Ray")
            ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            return init(*args, **kwargs)
        except Exception as error:
            if _TOO_LATE not in str(error):
                raise
            raise RuntimeError(
                f"Ray's node did not start in time ({error}). Either this machine is busy, or its disk slow or full: start the "
                "run again when less is going on. A node ends itself if its agent takes more than 15 s, which no setting "
                f"changes; for a start that is slower as a whole, raise {LIMIT} (now {os.environ.get(LIMIT)}). Or a process "
                "of Ray failed: see raylet.err and gcs_server.out in session_latest/logs of Ray's folder, /tmp/ray unless "
                "RAY_TMPDIR is set. A Ray that already runs is used with ray_kwargs.ray_init.address=auto"
            ) from error

    wrap(module, "init", init, patch=__name__)
