"""A CPU platform for VERL, which itself has accelerators only. VERL_PLATFORM=cpu chooses it; it is never detected.

`ray_resource_name` is "GPU" because VERL's resource check counts only GPUs and NPUs. A CPU run gives Ray a logical GPU
with `+ray_kwargs.ray_init.num_gpus=1`. Imported by register.py when VERL's platform registry exists.
"""

import contextlib
import types
from collections.abc import Iterator

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuDeviceModule(types.ModuleType):
    """torch.cpu, and those functions of torch.cuda that VERL calls. There is no device memory, so its figures are 0."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)


def _device_module() -> types.ModuleType:
    module = _CpuDeviceModule("megatrain_rl_cpu_device")
    do_nothing = ("empty_cache", "ipc_collect", "synchronize", "set_device", "reset_peak_memory_stats")
    figures = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    vars(module).update(
        **dict.fromkeys(do_nothing, lambda *args, **kwargs: None),
        **dict.fromkeys(figures, lambda *args, **kwargs: 0),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        mem_get_info=lambda *args, **kwargs: (0, 0),
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: "cpu",
        get_device_name=lambda *args, **kwargs: "cpu",
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """VERL's questions about a device, answered for a machine without one."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    # VERL calls `tensor.to(get_device_id())`, where the base class's int would mean an accelerator
    def current_device(self) -> str:  # type: ignore[override]
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
