"""``deepcompile validate``: whether a sharded step does what it does as written."""

import dataclasses

import jax

from jax_deepcompile import errors
from jax_deepcompile.cli.options import HERE, Cluster
from jax_deepcompile.cli.outputs import require_writable
from jax_deepcompile.cli.steps import StepRequest, sharded_step
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.training.config import NotNegative


def validate(request: StepRequest, cluster: Cluster = HERE, tolerance: NotNegative = 0.01) -> int:
    """Runs a step as written, on one device, and sharded, from the same values, and says where the results differ.

    Values are those that the step comes with, and made up where it comes with shapes. --plan validates a plan, also one
    for GPUs that are not here. The exit code is 1 where results differ, or are NaN or infinite and tell nothing.

    Args:
      tolerance: what may differ, of what the step changes of a leaf, beside what rounding explains.

    Raises:
      DevicesNotAttachedError: the devices are not here.
      StepSpecError: the step does not run on them as it is written.
    """
    require_writable("--out", request.out)
    with Progress(f"validate {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress)
        progress.say("running it as written and sharded")
        try:
            found = step.validate(*args, tolerance=tolerance)
        except errors.DeepCompileError:
            raise
        except RuntimeError as error:  # JAX's, of a kernel that these devices do not have
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise errors.StepSpecError(request.step, f"it does not run on {jax.default_backend()}: {first}") from error
    print(request.answer(lambda: dataclasses.asdict(found) | {"agrees": found.agrees}, str(found)))
    return 0 if found.agrees else 1
