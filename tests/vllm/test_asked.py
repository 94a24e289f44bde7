"""What the real vLLM of an environment says of itself to `rollout.engine=auto`."""

from hwgrpo_backends import registry

from hwgrpo.rollout.vllm.installed_vllm import SERVER, ask
from tests.vllm import vllm_environment


def test_the_cpu_build_of_vllm_says_its_version_and_that_it_computes_on_cpus():
    found = ask(vllm_environment.vllm_python(), vllm_environment.environment())
    assert (found.problem, found.device_type, found.with_hip) == (None, "cpu", False)
    assert found.why_unfit(registry.get("cpu"), SERVER) is None
    assert "this run trains on cuda" in str(found.why_unfit(registry.get("cuda"), SERVER))
