"""Eight virtual CPU devices for every test, set before JAX starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
