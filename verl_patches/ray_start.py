"""Ray of a run of ours listens on the loopback interface, and says what to do when its node does not start in time.

Symptom: a run on one machine listens on every interface, and Ray runs any code that it is sent; on a busy machine a run
    ends with "The current node timed out during startup".
Cause: Ray reads its switch for clusters of one node (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER) when it is imported, and VERL's
    mains import it before any config is read. The 30 s that it waits for its node are a number in its code.
Upstream: ray 2.60, _private/ray_constants.py:658 and _private/node.py:428. No issue known.
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
                "Ray's node did not start within the 30 s that Ray allows: the machine is busy, or its disk is full or slow "
                "(Ray's logs lie in /tmp/ray/session_latest/logs). Start the run again when less is going on, or start Ray "
                "before it with `ray start --head --node-ip-address=127.0.0.1` and set ray_kwargs.ray_init.address=auto"
            ) from error

    wrap(module, "init", init, patch=__name__)
