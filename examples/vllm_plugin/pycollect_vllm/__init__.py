"""A plugin of vLLM (`vllm.general_plugins`): its CPU workers communicate through pycollect.

vLLM calls `register` in each of its processes, before the workers make their process groups.
"""

import logging


def register() -> None:
    """Make "pycollect" the backend of the groups of vLLM's CPU platform; leave others unchanged."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        logging.getLogger(__name__).info("pycollect is for vLLM's CPU platform; not used here")
        return
    import pycollect  # noqa: F401  # registers the backend

    platform = type(current_platform)
    platform.dist_backend = "pycollect"
    name = f"{__name__}.communicator.PycollectCommunicator"
    platform.get_device_communicator_cls = classmethod(lambda cls: name)
