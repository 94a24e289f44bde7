"""The fused modules in Triton, launched: the interpreter's tests on the device."""

from tests.interpreter.test_fused_models import *  # noqa: F403
from tests.interpreter.test_fused_models import _a_cpu_takes_the_modules_of_gpus  # noqa: F401  a star leaves it out
from tests.interpreter.test_module_kernels import *  # noqa: F403
